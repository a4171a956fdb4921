"""Storing a step's keys and values in the pages that own their positions."""
