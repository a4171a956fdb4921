"""Causal attention of a chunk of queries a row over the row's pages, which hold the chunk's own keys already."""
