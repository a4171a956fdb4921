"""Attention of one query a row, the row's newest token, over the pages of its keys and values."""
