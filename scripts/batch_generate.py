"""Answer a file of prompts (JSON lines in, JSON lines out): `jaxinfer batch` from a checkout."""

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    main(["batch", *sys.argv[1:]])
