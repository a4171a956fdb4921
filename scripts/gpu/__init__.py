"""What `gpu_check.py` is made of: one module a part of the check, each run in a process of its own."""
