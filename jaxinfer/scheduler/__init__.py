"""Decides, in plain Python, what each step computes: queues, pages, prefixes, plans, and the loop that runs them."""
