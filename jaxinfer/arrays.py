"""One letter a meaning, one alias per kind of array; every signature that takes an array uses these.

t  tokens of a sequence in this step      h  query heads            w  width of the residual stream
s  sequences (rows) in this step          k  key and value heads    f  width of the MLP
p  pages in a row's table                 g  query heads per k      v  vocabulary, padded
n  pages in the pool                      c  size of one head       m  slots: seats in the engine's state
b  tokens in a page                       e  stop ids per row       x  logprobs returned per token
"""

from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, Shaped, UInt32

Tokens = Int32[Array, "s t"]
Positions = Int32[Array, "s t"]
"""Absolute position of each token; -1 marks padding, which is neither written nor read."""
PageTable = Int32[Array, "s p"]
Lengths = Int32[Array, " s"]
Slots = Int32[Array, " s"]
Pages = PyTree[Shaped[Array, "n planes k b *c"]]
"""One layer's share of the pool: [n, planes, k, b, c], keys then values, or numbers of fewer bits and their scales.

Who writes and reads it (`pallas_kernels.pages`) looks inside; nobody else does.
"""
Hidden = Float[Array, "s t w"]
Queries = Float[Array, "s t k g c"]
Keys = Float[Array, "s t k c"]
Values = Float[Array, "s t k c"]
Logits = Float32[Array, "s v"]
RowFloat = Float32[Array, " s"]
RowInt = Int32[Array, " s"]
RowBool = Bool[Array, " s"]
RowKey = UInt32[Array, "s 2"]
StopIds = Int32[Array, "s e"]
