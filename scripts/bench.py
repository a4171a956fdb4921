"""Measure this machine's speed beside its roofline bound: `jaxinfer bench` from a checkout."""

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
