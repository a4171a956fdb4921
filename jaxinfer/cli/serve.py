"""`jaxinfer serve`: the gRPC server."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.flags import DEMO, RefArgument, SamplingFlag, engine_config, takes
from jaxinfer.config import EngineConfig

if TYPE_CHECKING:
    from jaxinfer_server.launch import ServeOptions


def serve_options(
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.  [default: 50051]")] = None,
    longest: Annotated[float | None, typer.Option(help="Seconds that any request may take.  [default: 600]")] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM.  [default: 30]")
    ] = None,
    receive_bytes: Annotated[int | None, typer.Option(help="Of the largest request.  [default: 4194304]")] = None,
) -> "ServeOptions":
    """How the server listens. Unset flags keep `ServeOptions`' own defaults, which would cost an import to show."""
    from jaxinfer_server.launch import ServeOptions

    given = {"host": host, "port": port, "longest": longest, "grace": grace, "receive_bytes": receive_bytes}
    return ServeOptions(**{name: value for name, value in given.items() if value is not None})  # pyright: ignore[reportArgumentType]


@takes(options=serve_options, engine=engine_config)
def command(
    ref: RefArgument = DEMO,
    *,
    sampling: SamplingFlag = "none",
    options: "ServeOptions",
    engine: EngineConfig,
) -> None:
    """Serve a model over gRPC until SIGTERM, which drains.

    The services are jaxinfer.v1.Inference, grpc.health.v1.Health and reflection.

    \b
    jaxinfer serve
    jaxinfer serve ./my-model --host 0.0.0.0 --port 50051 --slots 64
    jaxinfer serve hf:meta-llama/Llama-3.1-8B-Instruct --tensor 4 --dtype bfloat16
    """
    from jaxinfer_server.launch import loading, serve

    code = serve(ref, engine, options, sampling=sampling, progress=sys.stderr.isatty())
    if loading():
        sys.stdout.flush()
        os._exit(code)  # else Python would wait for every executable that is still being compiled
    raise typer.Exit(code)
