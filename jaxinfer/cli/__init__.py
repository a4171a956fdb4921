"""The `jaxinfer` command: one module a subcommand.

Exit codes: 0 fine, 1 the machine or the engine failed, 2 bad usage or bad input, 3 some lines of a batch failed, 130
interrupted. Nothing here imports JAX before a command needs it, so `--help` answers at once.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from jaxinfer import __version__
from jaxinfer.cli import batch, bench, chat, convert, doctor, generate, plan, serve
from jaxinfer.cli import eval as evaluate
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError, RequestError

BAD_INPUT = (RequestError, ConfigError, CheckpointError)

app = typer.Typer(
    name="jaxinfer",
    help="Serve decoder-only language models with JAX, on TPU, GPU and CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for module in (generate, chat, serve, batch, convert, plan, bench, evaluate, doctor):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxinfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, `sys.argv` by default. Exits; an error of ours or of the system is one line on stderr."""
    try:
        app(arguments, prog_name="jaxinfer")
    except JaxInferError as error:
        print(f"jaxinfer: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BAD_INPUT) else 1)
    except OSError as error:  # a folder that is not there, a full disk; click itself sees to a closed pipe
        print(f"jaxinfer: {error}", file=sys.stderr)
        sys.exit(1)
