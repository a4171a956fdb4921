"""Flags that several commands share, each declared once, and how a command takes a whole group of them.

Knows: how flags become `SamplingParams` and `EngineConfig`. A group is a plain function whose parameters are the flags.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxinfer.config import CacheConfig, DTypeName, EngineConfig, KVDTypeName, MeshConfig, QuantizeName
from jaxinfer.errors import BadSamplingParam, ConfigError
from jaxinfer.request import Sampling, SamplingParams

Ref = Annotated[
    str, typer.Option("--model", "-m", metavar="REF", help="A directory, a .gguf file, hf:org/name, or demo.")
]
RefArgument = Annotated[str, typer.Argument(metavar="REF", help="A directory, a .gguf file, hf:org/name, or demo.")]
DEMO = "demo"
QuantizeFlag = Annotated[
    QuantizeName | None,
    typer.Option(help="Keep the large matrices in int8, in int4, or as the GGUF file has them stored."),
]
KVDTypeFlag = Annotated[
    KVDTypeName | None, typer.Option(help="Of the KV cache: int8 holds twice to four times the tokens.")
]
SamplingFlag = Annotated[
    Sampling, typer.Option(help="Where no flag says: what the checkpoint recommends, or none of it.")
]
_P = SamplingParams()
_E = EngineConfig()


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter of a command by the flags of its group; the command gets what the group returns."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = {
                name: group(**{flag: values.pop(flag) for flag in inspect.signature(group).parameters})
                for name, group in groups.items()
            }
            command(**values, **made)

        flags: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            group = groups.get(parameter.name)
            flags += inspect.signature(group).parameters.values() if group else [parameter]
        flags = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
        run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
        run.__annotations__ = {flag.name: flag.annotation for flag in flags}
        return run

    return decorate


def without(group: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The group without the flags `names`, which keep their defaults."""

    @functools.wraps(group)
    def narrowed(**values: Any) -> Any:
        return group(**values)

    kept = [flag for name, flag in inspect.signature(group).parameters.items() if name not in names]
    narrowed.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return narrowed


def sampling_params(
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = _P.max_tokens,
    min_tokens: Annotated[int, typer.Option(help="Forbid every kind of stop before this many.")] = _P.min_tokens,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = _P.temperature,
    top_k: Annotated[int, typer.Option(help="Sample from the k best tokens; 0 is off.")] = _P.top_k,
    top_p: Annotated[float, typer.Option(help="Sample from the best tokens that hold this probability.")] = _P.top_p,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's.")] = _P.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens of prompt and output get less likely.")
    ] = _P.repetition_penalty,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logit of each token in the output.")
    ] = _P.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off once per occurrence in the output.")
    ] = _P.frequency_penalty,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same tokens; unset, each run differs.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Continuations of each prompt.")] = _P.n,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the output; may be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Token id that ends it; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Return the log-probabilities of this many best tokens.")] = None,
) -> SamplingParams:
    """How the next tokens are chosen. Raises BadSamplingParam."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(entry) for entry in logit_bias or ()),
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )


def _bias(entry: str) -> tuple[int, float]:
    token, _, bias = entry.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise BadSamplingParam(f"--logit-bias is {entry!r}; expected ID=BIAS, such as 198=-100") from None


def _kernel(entry: str) -> tuple[str, str]:
    operation, _, form = entry.partition("=")
    if not (operation and form):
        raise ConfigError(f"--kernel is {entry!r}; expected OPERATION=FORM, such as kv_write=xla")
    return operation, form


def engine_config(
    slots: Annotated[
        int, typer.Option(help="Sequences decoded together; generate and chat take as many as they can use.")
    ] = _E.slots,
    context: Annotated[int | None, typer.Option(help="Most tokens of a sequence; unset, the model's own.")] = None,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens of one prefill call.")] = _E.chunk,
    queue: Annotated[int, typer.Option(help="Requests that may wait.")] = _E.queue,
    dtype: Annotated[
        DTypeName | None, typer.Option(help="Of weights and cache; unset, float32 on CPU and bfloat16 elsewhere.")
    ] = None,
    quantize: QuantizeFlag = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Results bitwise equal whatever else runs; slower.")
    ] = False,
    prefix_cache: Annotated[bool, typer.Option(help="Share pages between prompts that begin alike.")] = True,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the KV cache; unset, 64, and 128 with --kv-dtype int8.")
    ] = None,
    pages: Annotated[int | None, typer.Option(help="Pages in the pool; unset, by --memory-fraction.")] = None,
    kv_dtype: KVDTypeFlag = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the memory that the pool takes.")
    ] = _E.cache.memory_fraction,
    tensor: Annotated[int, typer.Option(help="Devices that share the model.")] = _E.mesh.tensor,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATION=FORM",
            help="A form to run instead of the default, such as kv_write=xla; may be repeated.",
        ),
    ] = None,
) -> EngineConfig:
    """What the engine holds. Raises ConfigError."""
    return EngineConfig(
        slots=slots,
        context=context,
        chunk=chunk,
        queue=queue,
        dtype=dtype,
        quantize=quantize,
        deterministic=deterministic,
        prefix_cache=prefix_cache,
        kernels=tuple(_kernel(entry) for entry in kernel or ()),
        cache=CacheConfig(page_size=page_size, pages=pages, memory_fraction=memory_fraction, dtype=kv_dtype),
        mesh=MeshConfig(tensor=tensor),
    )
