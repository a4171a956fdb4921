"""One letter a meaning, for every kernel of this folder.

s  sequences (rows)         n  pages in the pool        k  key and value heads
t  tokens of a row          b  tokens in a page         g  query heads per key head
p  pages in a row's table                               c  features of a head
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int8, Int32


class Int8Pages(NamedTuple):
    """Pages of int8 numbers, and what each head's key and value of a token is to be multiplied by."""

    numbers: Int8[Array, "*n k b c"]
    scales: Float32[Array, "*n k b"]


Pages = Float[Array, "n planes k b c"] | Int8Pages
Queries = Float[Array, "s t k g c"]
DecodeQueries = Float[Array, "s k g c"]
NewKeys = Float[Array, "s t k c"]
PageTable = Int32[Array, "s p"]
Positions = Int32[Array, "s t"]
Lengths = Int32[Array, " s"]
Sinks = Float32[Array, "k g"]
"""A logit per query head that takes its share of the softmax and adds nothing; neither scaled nor capped."""
