"""Compiles for a TPU without one, and reads what the compiler made: memory, HLO, and the cost of each Pallas kernel.

`libtpu` finds and starts the compiler, `chips` says what the chips are, `compiling` compiles and collects, `bundles`
reads the scheduled code. Nothing here runs on a TPU, so nothing here is a time: docs/tpu.md says what the counts mean.
"""
