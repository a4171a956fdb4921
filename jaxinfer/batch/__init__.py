"""Batch files: JSON lines in, JSON lines out, in order, each exactly once.

lines.py reads and checks a line, records.py writes its answer, journal.py keeps the output file, job.py runs them.
"""
