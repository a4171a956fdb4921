"""Causal attention of each query over its row's pages."""
