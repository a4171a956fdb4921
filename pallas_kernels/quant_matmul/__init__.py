"""Products with weights of int8 or int4 numbers: dequantised on the way, never kept decoded.

One letter a meaning here:

n  rows of x                o  outputs: rows of the weight
i  inputs: what is summed   g  groups of neighbouring inputs that share a scale and an offset
"""
