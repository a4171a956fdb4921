"""The decoder's arithmetic in Flax Linen, and what each model family calls it.

`transformer` stacks the blocks of `attention` and `layers`; `ops` is what they ask of the hardware; `families` reads
other people's names for the same tensors. Everything here is pure: parameters and the page pool come in as arguments
and go out as results. Nothing here jits, shards, samples or counts pages.
"""
