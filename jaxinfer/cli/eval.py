"""`jaxinfer eval`: perplexity of a model on a text."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.flags import DEMO, KVDTypeFlag, QuantizeFlag, RefArgument
from jaxinfer.cli.json_text import json_text
from jaxinfer.config import DTypeName, EngineConfig, MeshConfig
from jaxinfer.errors import RequestError
from jaxinfer.progress import progress_bars
from jaxinfer.roofline import Chip, bound

if TYPE_CHECKING:
    from jaxinfer.perplexity import Perplexity


def command(
    ref: RefArgument = DEMO,
    *,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, UTF-8.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; unset, 1024 or the model's own where that is less.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; unset, half a window.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens of the text.")] = None,
    dtype: Annotated[
        DTypeName | None, typer.Option(help="Of weights and cache; unset, float32 on CPU and bfloat16 elsewhere.")
    ] = None,
    quantize: QuantizeFlag = None,
    kv_dtype: KVDTypeFlag = None,
    tensor: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines for people.")] = False,
) -> None:
    """Measure how well a model predicts a text: perplexity, bits per byte.

    The windows are those of Hugging Face's recipe for models of a fixed length, each scoring what no window before it
    has scored, so that figures can be compared; a model that wants a BOS gets one in front of every window. A longer
    --stride is faster and gives a token less to go by. A longrope has the factors that a server of that --context would
    have. The speed stands beside the roofline of this machine.

    \b
    jaxinfer eval demo --text book.txt
    jaxinfer eval ./my-model --text book.txt --context 4096 --stride 512 --json
    """
    from jaxinfer.bench import measure_machine
    from jaxinfer.checkpoint.load import load
    from jaxinfer.engine.compilation import enable_persistent_cache
    from jaxinfer.engine.runner import engine_dtype
    from jaxinfer.engine.sharding import make_mesh, param_shardings
    from jaxinfer.model.quantised import describe
    from jaxinfer.perplexity import perplexity

    content = _read(text)
    enable_persistent_cache()
    mesh, named = make_mesh(MeshConfig(tensor=tensor)), engine_dtype(EngineConfig(dtype=dtype))
    with progress_bars(sys.stderr.isatty()) as report:
        checkpoint = load(
            ref,
            dtype=named,
            quantize=quantize,
            shardings=lambda config: param_shardings(config, mesh),
            progress=report,
        )
        found = perplexity(
            checkpoint,
            content,
            dtype=named,
            kv_dtype=kv_dtype,
            context=context,
            stride=stride,
            tokens=tokens,
            mesh=mesh,
            report=report,
        )
    kept = describe(checkpoint.params)
    about = _summary(found, measure_machine(named), tensor) | {
        "model": checkpoint.name,
        "dtype": named,
        "weights": kept or named,
        "kv_dtype": kv_dtype or named,
    }
    print(json_text(about) if as_json else _lines(about))


def _read(path: Path) -> str:
    """The whole text. Raises RequestError where it cannot be read, or is no UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def _summary(found: "Perplexity", machine: Chip, devices: int) -> dict[str, Any]:
    """Plain data. Rates in tokens scored per second; roofline: the share of the highest possible rate."""
    limit = bound(found.cost, machine, devices)
    return {
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "nll": found.nll,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "context": found.context,
        "stride": found.stride,
        "seconds": found.seconds,
        "rate": found.tokens / found.seconds,
        "rate_bound": found.tokens / limit.seconds,
        "bound_by": limit.limit,
        "roofline": limit.seconds / found.seconds,
        "windows": [asdict(window) for window in found.windows],
    }


def _lines(about: dict[str, Any]) -> str:
    kinds = {"weights": about["weights"], "cache": about["kv_dtype"]}
    told = [about["dtype"], *(f"{part} in {kind}" for part, kind in kinds.items() if kind != about["dtype"])]
    return (
        "{model}, {told}: perplexity {perplexity:.4f}, {bits_per_byte:.4f} bits per byte\n"
        "{tokens} tokens scored ({bytes} bytes) in {count} window(s) of {context}, {stride} apart\n"
        "{rate:.1f} tokens/s; this machine's roofline, bound by {bound_by}, is {rate_bound:.1f}: {roofline:.0%} of it"
    ).format(**about, told=", ".join(told), count=len(about["windows"]))
