"""Attention over a paged cache: one folder per operation, usable without the rest of this repository.

Each folder holds `reference` (the meaning, in plain jnp), `xla` (the same fast, in plain XLA), the kernels `tpu`
(Pallas for Mosaic TPU) and `gpu` (Pallas for Mosaic GPU), and `shapes` (named real shapes that tests and benchmarks
share). All forms have one signature. `dispatch` chooses one. Only jax and jaxtyping are imported.

The pool of one layer is [n, planes, k, b, c]: pages, keys then values, heads, tokens in a page, features. A page's head
is one contiguous [b, c] matrix. `pages` tells what else a pool can be.
"""
