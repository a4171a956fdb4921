"""The parts put together: a loaded model, its tokenizer, a warm engine and the loop that feeds it.

Knows: the order in which the parts are made, and every check that turns what a caller sent into a `Request`. Knows no
door: `LLM`, the batch command and the server all start here.
"""

import operator
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np

from jaxinfer.checkpoint.load import load
from jaxinfer.config import DTypeName, EngineConfig, ModelConfig
from jaxinfer.engine.compilation import enable_persistent_cache
from jaxinfer.engine.runner import EngineRunner, engine_dtype
from jaxinfer.engine.sharding import make_mesh, param_shardings
from jaxinfer.errors import BadSamplingParam, PromptTooLong, RequestError
from jaxinfer.progress import progress_bars
from jaxinfer.request import MAX_STOP_IDS, SEED_BOUND, Request, Sampling, SamplingParams
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.protocol import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
"""Text, token ids, or chat messages (`{"role": ..., "content": ...}`)."""

DEFAULT_ENGINE = EngineConfig()
DEFAULT_PARAMS = SamplingParams()
MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Assembly:
    """One model ready to serve. `engine` is the configuration as it was resolved: its dtype is never None.

    `sampling` is what the checkpoint recommends. `defaults` are the parameters of a request that says nothing: those of
    the model's own distribution, unless the recommendation was asked for.
    """

    name: str
    config: ModelConfig
    engine: EngineConfig
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    eos_ids: frozenset[int]
    runner: EngineRunner
    loop: EngineLoop[Any]
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    defaults: SamplingParams = DEFAULT_PARAMS

    @property
    def context(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return self.runner.limits.context

    @property
    def vocab_size(self) -> int:
        """Ids that a caller may name run from 0 to vocab_size - 1; the padding rows of the embedding are not ids."""
        return self.runner.limits.vocab_size

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """The checked request: prompt tokenised, ids within the vocabulary, lengths within the context, seed chosen.

        `deadline` is in `time.monotonic` seconds. A `max_tokens` that the context cannot hold ends with LENGTH where
        the context ends. Raises RequestError, PromptTooLong or BadSamplingParam, each naming what is wrong.
        """
        ids = self.tokenize(prompt)
        if len(ids) + 1 > self.context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and one more must fit the context of {self.context} tokens; "
                f"send at most {self.context - 1}"
            )
        self._check_bias(params)
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
            raise RequestError(f"cache_salt is {cache_salt!r:.40}; expected at most {MAX_SALT_CHARS} characters")
        return Request(
            id=request_id or uuid.uuid4().hex,
            prompt=ids,
            params=params,
            seed=secrets.randbelow(SEED_BOUND) if params.seed is None else params.seed,
            stop_ids=self._stop_ids(params),
            arrival=time.monotonic(),
            deadline=deadline,
            priority=_whole("priority", priority, -(2**31), 2**31),
            cache_salt=cache_salt,
        )

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt, with exactly one BOS where the model wants one; ids are checked and passed through.

        Control tokens spelled out in a text prompt are control tokens: whoever writes a raw prompt writes the template
        too. In chat messages they are plain text. Raises RequestError for an empty or ill-typed prompt.
        """
        if isinstance(prompt, np.ndarray | jax.Array):
            prompt = prompt.tolist()  # JAX would compile a slice to walk over one of its own
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"prompt is a {type(prompt).__name__}; expected text, token ids or chat messages")
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._encode_chat(cast(Messages, prompt))
        else:
            ids = prompt
        if not len(ids):
            raise RequestError("the prompt is empty; expected at least one token")
        return tuple(_whole("prompt token", token, 0, self.vocab_size) for token in ids)

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt holds half a surrogate pair at character {error.start}") from None
        ids = self.tokenizer.encode(text, bos=True, special=True)
        doubled = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_id
        return ids[1:] if doubled else ids

    def _encode_chat(self, messages: Messages) -> list[int]:
        if self.chat is None:
            raise RequestError(f"model {self.name} has no chat template; send text or token ids")
        return self.chat.encode(messages)

    def _check_bias(self, params: SamplingParams) -> None:
        for token in params.logit_bias:
            if token >= self.vocab_size:
                raise BadSamplingParam(f"logit_bias names token {token}; expected ids from 0 to {self.vocab_size - 1}")

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise BadSamplingParam(f"stop_token_ids holds {token}; expected ids from 0 to {self.vocab_size - 1}")
        union = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        if len(union) > MAX_STOP_IDS:
            raise BadSamplingParam(
                f"stop_token_ids and the model's end-of-text ids are {len(union)} ids; at most {MAX_STOP_IDS} fit"
            )
        return union


def _whole(name: str, value: object, low: int, bound: int) -> int:
    """`value` as an int within low .. bound - 1; numpy integers pass, bools and floats do not."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number < bound:
        raise RequestError(f"{name} is {value!r:.40}; expected a whole number from {low} to {bound - 1}")
    return number


def recommended_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a checkpoint recommends, ours where it says nothing."""
    return SamplingParams(**sampling)


def assemble(
    ref: str, engine: EngineConfig = DEFAULT_ENGINE, *, progress: bool = False, sampling: Sampling = "none"
) -> Assembly:
    """Load the model that `ref` names, build its engine and compile every step; `progress` draws bars on stderr.

    With `sampling="checkpoint"`, what the checkpoint recommends becomes the assembly's `defaults`.
    Raises CheckpointError for an unknown or damaged `ref`, ConfigError for an engine that the model or the machine
    cannot hold.
    """
    enable_persistent_cache()
    engine = replace(engine, dtype=cast(DTypeName, engine_dtype(engine)))
    mesh = make_mesh(engine.mesh)
    with progress_bars(progress) as report:
        checkpoint = load(
            ref,
            dtype=str(engine.dtype),
            quantize=engine.quantize,
            shardings=lambda config: param_shardings(config, mesh),
            progress=report,
        )
        vocabulary = checkpoint.tokenizer.vocab_size
        runner = EngineRunner.build(checkpoint.config, checkpoint.params, engine, vocab_size=vocabulary)
        runner.warm_up(report)
    loop = EngineLoop(runner, queue=engine.queue, prefix_cache=engine.prefix_cache, deterministic=engine.deterministic)
    template = checkpoint.chat_template
    return Assembly(
        name=checkpoint.name,
        config=checkpoint.config,
        engine=engine,
        tokenizer=checkpoint.tokenizer,
        chat=ChatTemplate(template, checkpoint.tokenizer) if template else None,
        eos_ids=checkpoint.eos_ids,
        runner=runner,
        loop=loop,
        sampling=checkpoint.sampling,
        defaults=recommended_params(checkpoint.sampling) if sampling == "checkpoint" else DEFAULT_PARAMS,
    )
