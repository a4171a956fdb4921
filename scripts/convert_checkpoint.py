"""Convert a checkpoint to one that loads straight to its devices: `jaxinfer convert` from a checkout."""

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
