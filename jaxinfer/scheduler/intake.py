"""What the loop refuses at its door, before a request costs anything.

Knows: the engine's limits. The doors check parameters against the model; here stands what would break the scheduler or,
because the device clamps an index that is out of range in silence, give wrong tokens to somebody.
"""

from collections.abc import Iterable

from jaxinfer.errors import ConfigError, PromptTooLong, RequestError
from jaxinfer.plan import Limits
from jaxinfer.request import MAX_STOP_IDS, Request


def check_limits(limits: Limits) -> None:
    """Raise ConfigError where no plan could be made within `limits`."""
    if limits.chunk < limits.page_size or limits.chunk % limits.page_size:
        raise ConfigError(f"chunk is {limits.chunk}; expected a multiple of page_size {limits.page_size}")
    if limits.step_tokens < limits.page_size:
        raise ConfigError(f"step_tokens is {limits.step_tokens}; expected a page of {limits.page_size} tokens or more")
    if min(limits.slots, limits.pages, limits.context - 1) < 1:
        raise ConfigError(
            f"slots, pages, context are {limits.slots}, {limits.pages}, {limits.context}; expected 1, 1, 2 or more"
        )


def check_request(request: Request, limits: Limits) -> None:
    """Raise PromptTooLong where the prompt can never run.

    Raise RequestError where it is empty, an id is out of the vocabulary, or the stop ids do not fit into a row.
    """
    length = len(request.prompt)
    if length == 0:
        raise RequestError("the prompt has 0 tokens; expected at least one")
    if length + 1 > limits.context:
        raise PromptTooLong(
            f"the prompt has {length} tokens; expected at most {limits.context - 1}, "
            f"a context of {limits.context} less one token of output"
        )
    room = limits.pages * limits.page_size
    if length > room:
        raise PromptTooLong(f"the prompt has {length} tokens; expected at most {room}, all that the page pool holds")
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"the request has {len(request.stop_ids)} stop ids; expected at most {MAX_STOP_IDS}")
    _check_ids("prompt", request.prompt, limits.vocab_size)
    _check_ids("stop_ids", request.stop_ids, limits.vocab_size)
    _check_ids("logit_bias", request.params.logit_bias, limits.vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"{name} holds token id {wrong}; expected ids from 0 to {vocab_size - 1}")
