"""One letter a meaning, for every kernel of this folder.

s  sequences (rows)         n  pages in the pool        k  key and value heads
t  tokens of a row          b  tokens in a page         g  query heads per key head
p  pages in a row's table                               c  features of a head
"""

from jaxtyping import Array, Float, Float32, Int32

Pages = Float[Array, "n planes k b c"]
Queries = Float[Array, "s t k g c"]
NewKeys = Float[Array, "s t k c"]
PageTable = Int32[Array, "s p"]
Positions = Int32[Array, "s t"]
Lengths = Int32[Array, " s"]
Sinks = Float32[Array, "k g"]
"""A logit per query head that takes its share of the softmax and adds nothing; neither scaled nor capped."""
