"""`python -m jaxinfer` is the `jaxinfer` command."""

from jaxinfer.cli import main

if __name__ == "__main__":
    main()
