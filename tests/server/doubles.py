"""A model whose tokens the test decides: bytes are its tokens, and its prompt says what it answers.

`say:hello` answers `hello` and an end of text; anything else is answered by letters without end. The loop, the bridge
and the doors around it are the real ones. Run as a script it serves until it is told to stop.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxinfer.assembly import Assembly
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.ops import Kernel
from jaxinfer.plan import DecodeRow, Limits, PrefillChunk, RowParams, StepPlan, StepTokens
from jaxinfer.request import SampledToken
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer_server.launch import ServeOptions, serve

EOS = 256
VOCAB = 257
LETTERS = 26


class ByteTokenizer:
    """One token a byte, and an end of text."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = frozenset({EOS})
    special_tokens: ClassVar = {"<eos>": EOS}
    reserved_tokens: ClassVar = special_tokens
    bos_token, eos_token = "", "<eos>"

    def encode(self, text: str, *, bos: bool = True, special: bool = False, sentinel: str = "") -> list[int]:
        parts = text.split("<eos>") if special else [text]
        ids = [list(part.encode()) for part in parts]
        return ids[0] + [token for part in ids[1:] for token in (EOS, *part)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        pieces = (self.token_bytes(token) for token in ids if token != EOS or not skip_special)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else bytes([token])

    def files(self) -> dict[str, bytes]:
        return {}


class JoinedChat:
    """Joins the contents of the messages; the last one is what the model answers."""

    def encode(self, messages: Sequence[Any]) -> list[int]:
        return list("".join(message["content"] for message in messages).encode())


class ScriptedRunner:
    """Answers every plan at once. `before_step` runs in each dispatch: it may wait, or raise."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.weights = "int8 by channel"
        self.kernels = (Kernel("kv_write", "scripted", "a double has no other"),)
        self.before_step: Callable[[], object] = lambda: None
        self.threads: set[int] = set()
        self._tokens: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}

    def dispatch(self, plan: StepPlan) -> StepTokens:
        self.threads.add(threading.get_ident())
        self.before_step()
        prefills = tuple(sampled for chunk in plan.prefills for sampled in self._prefill(chunk))
        return StepTokens(prefills, tuple(self._decode(row) for row in plan.decodes))

    def fetch(self, handle: StepTokens) -> StepTokens:
        return handle

    def _prefill(self, chunk: PrefillChunk) -> list[SampledToken]:
        known = [] if chunk.start == 0 else self._tokens[chunk.slot]
        self._tokens[chunk.slot] = [*known, *chunk.tokens]
        self._prompts[chunk.slot] = len(self._tokens[chunk.slot])
        return [self._sample(chunk.slot, chunk.row)] if chunk.samples else []

    def _decode(self, row: DecodeRow) -> SampledToken:
        return self._sample(row.slot, row.row)

    def _sample(self, slot: int, row: RowParams) -> SampledToken:
        tokens = self._tokens[slot]
        token = answer(tokens[: self._prompts[slot]], len(tokens) - self._prompts[slot], row)
        tokens.append(token)
        if row.params.logprobs is None:
            return SampledToken(token)
        return SampledToken(token, -0.5, tuple((other, -0.5 - other) for other in range(row.params.logprobs)))


def answer(prompt: Sequence[int], index: int, row: RowParams) -> int:
    """The token at `index` of the answer to `prompt`."""
    command, _, wanted = bytes(token for token in prompt if token != EOS).partition(b"say:")
    if not command and wanted:
        ended = index >= len(wanted)
        return (ord(".") if row.ban_stops else EOS) if ended else wanted[index]
    return ord("a") + (row.seed + row.choice + index) % LETTERS


def scripted_assembly(*, slots: int = 8, queue: int = 64, context: int = 4096, pages: int = 1024) -> Assembly:
    """The real loop over the scripted runner."""
    limits = Limits(
        slots=slots, pages=pages, page_size=16, context=context, chunk=64, step_tokens=256, vocab_size=VOCAB
    )
    runner: Any = ScriptedRunner(limits)
    config = ModelConfig("scripted", VOCAB, 8, 1, 1, 1, 8, 8, context, 1.0)
    chat: Any = JoinedChat()
    return Assembly(
        name="scripted",
        config=config,
        engine=EngineConfig(slots=slots, queue=queue, dtype="float32"),
        tokenizer=ByteTokenizer(),
        chat=chat,
        eos_ids=frozenset({EOS}),
        runner=runner,
        loop=EngineLoop(runner, queue=queue, prefix_cache=False),
    )


def paced_assembly(pause: float) -> Assembly:
    """As `scripted_assembly`, with steps that take a while."""
    assembly = scripted_assembly()
    runner: Any = assembly.runner
    runner.before_step = lambda: threading.Event().wait(pause)
    return assembly


if __name__ == "__main__":
    sys.exit(serve(lambda: paced_assembly(0.01), options=ServeOptions(port=0, grace=float(sys.argv[1]))))
