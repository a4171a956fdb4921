"""What a message asks for, checked: from the wire to what the assembly takes.

Knows: which checks are cheap and come first, so that a hopeless message costs little. Runs on worker threads; knows no
call and no event loop.
"""

from typing import cast

from jaxinfer.assembly import Assembly, Messages
from jaxinfer.errors import BadSamplingParam, PromptTooLong, RequestError
from jaxinfer.request import Request
from jaxinfer_server.convert import Prompt, chat_from_wire, is_chat, params_from_wire, prompt_from_wire
from jaxinfer_server.schema import check_known, check_messages, check_request_id
from jaxinfer_server.v1 import inference_pb2 as pb

_HEAD_CHARS = 8
"""Characters per token of context that are looked at first; English text has four to five."""
_CUT_TOKENS = 64
"""More than cutting a text in two can add to the tokens of its first part."""


def request_of(assembly: Assembly, message: pb.GenerateRequest, deadline: float | None) -> Request:
    """The checked request that `message` asks for. Raises RequestError, naming the field."""
    check_request_id(message.request_id)
    check_messages(message.chat)
    check_known(message)
    if len(message.sampling.logit_bias) > assembly.vocab_size:
        raise BadSamplingParam(f"logit_bias has more entries than there are ids, {assembly.vocab_size}")
    prompt = prompt_from_wire(message)
    _check_length(assembly, prompt)
    return assembly.request(
        prompt,
        params_from_wire(message.sampling, assembly.defaults),
        request_id=message.request_id or None,
        deadline=deadline,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _check_length(assembly: Assembly, prompt: Prompt) -> None:
    """Refuse a hopeless prompt by its beginning: four megabytes take a tokenizer seconds.

    Raises PromptTooLong where the beginning alone has clearly more tokens than the context.
    """
    if not isinstance(prompt, str) and not is_chat(prompt):
        if len(prompt) > assembly.context:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens; the context is {assembly.context} tokens")
        return
    parts = [prompt] if isinstance(prompt, str) else [" ".join(m.values()) for m in cast(Messages, prompt)]
    text = "".join(parts)
    head = text[: _HEAD_CHARS * assembly.context]
    if len(head) < len(text):
        tokens = len(assembly.tokenizer.encode(head, bos=False, special=isinstance(prompt, str)))
        if tokens > assembly.context + _CUT_TOKENS:
            raise PromptTooLong(
                f"the first {len(head)} of the prompt's {len(text)} characters are {tokens} tokens; "
                f"the context is {assembly.context} tokens"
            )


def tokenized(assembly: Assembly, request: pb.TokenizeRequest) -> list[int]:
    """The ids of a text or of messages. Raises RequestError."""
    match request.WhichOneof("input"):
        case "text" if request.HasField("bos") and not request.bos:
            return assembly.tokenizer.encode(request.text, bos=False, special=True)
        case "text":
            return list(assembly.tokenize(request.text))
        case "chat" if request.HasField("bos"):
            raise RequestError("bos is set beside chat, where the template decides; leave it out")
        case "chat":
            check_messages(request.chat)
            return list(assembly.tokenize(chat_from_wire(request.chat)))
        case _:
            raise RequestError("input is not set; expected text or chat")


def detokenized(assembly: Assembly, request: pb.DetokenizeRequest) -> str:
    """The text of ids. Raises RequestError for one out of the vocabulary."""
    for token in request.token_ids:
        if not 0 <= token < assembly.vocab_size:
            raise RequestError(f"token_ids holds {token}; expected ids from 0 to {assembly.vocab_size - 1}")
    skip_special = request.skip_special if request.HasField("skip_special") else True
    return assembly.tokenizer.decode(request.token_ids, skip_special=skip_special)
