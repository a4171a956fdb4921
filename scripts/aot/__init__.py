"""Compiles for accelerators that are not there, and reads what the compiler made: memory, HLO, each kernel's cost.

For TPUs: `libtpu` finds and starts the compiler, `chips` says what the chips are, `compiling` compiles and collects,
`bundles` reads the scheduled code, `figures` and `table` make of it what scripts/tpu_aot.py prints. For an H200: `cuda`
starts, describes, compiles and collects, `sass` reads the machine code, `cuda_table` makes what scripts/gpu_aot.py
prints. `kernels`, `steps` and `jobs` are what is compiled, for both. Nothing here runs on an accelerator, so nothing
here is a time: docs/tpu.md and docs/gpu.md say what the counts mean.
"""
