"""Scripted token events in, Deltas out: joined text, one end a choice, stop strings, log-probabilities."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.errors import EngineFault
from jaxinfer.request import Delta, FinishReason, Request, SampledToken, SamplingParams, Timing, TokenEvent, Usage
from jaxinfer.stream import RequestStream
from jaxinfer.text.json_codec import byte_alphabet
from jaxinfer.text.tokenizer import TextTokenizer, from_gguf

BOS, EOS = 256, 257
PROMPT = (BOS, ord("p"))


@pytest.fixture(scope="module")
def by_bytes() -> TextTokenizer:
    """A byte-level tokenizer without merges: id = byte, then <s> and </s>."""
    letters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    return from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt2",
            "tokenizer.ggml.tokens": [*letters, "<s>", "</s>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


@pytest.fixture(scope="module")
def smollm(demo_path: Path) -> TextTokenizer:
    return from_gguf(read_header(demo_path).fields)


def request(**params: object) -> Request:
    params = SamplingParams(**params)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
    return Request("r", PROMPT, params, seed=0, stop_ids=stop_ids)


def timing(tokens: int) -> Timing:
    return Timing(queue=0.5, ttft=1.0, itl=tuple(float(i) for i in range(1, tokens)))


def script(
    request: Request,
    ids: list[int],
    *,
    choice: int = 0,
    group: int = 1,
    late: int = 0,
    reason: FinishReason | None = None,
) -> list[TokenEvent]:
    """The events that a loop sends for sampled `ids`: `group` tokens an event, ended by a stop id or by `reason`.

    `late`: the end comes in an event of its own, after that many further tokens in flight.
    """
    ids = [*ids, *range(97, 97 + late)]
    stop_id = ids[-1] if reason is None and ids and ids[-1] in request.stop_ids else None
    finish = FinishReason.STOP if stop_id is not None else (reason or FinishReason.LENGTH)
    groups = [tuple(SampledToken(token) for token in ids[at : at + group]) for at in range(0, len(ids), group)]
    end = {"finish": finish, "stop_id": stop_id, "usage": Usage(2, len(ids), 1), "timing": timing(len(ids))}
    events = [TokenEvent("r", choice, tokens) for tokens in groups]
    if late or not events:
        return [*events, TokenEvent("r", choice, (), **end)]
    return [*events[:-1], replace(events[-1], **end)]


def run(stream: RequestStream, events: list[TokenEvent]) -> list[Delta]:
    return [delta for event in events for delta in stream.feed(event)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 50])
def test_the_stop_ids_text_is_left_out_and_its_id_is_not(by_bytes: TextTokenizer, group: int):
    asked = request()
    deltas = run(RequestStream(asked, by_bytes), script(asked, [*b"hello", EOS], group=group))
    assert (text(deltas), ids(deltas)) == ("hello", [*b"hello", EOS])
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish, last.stop_reason, last.usage, last.timing) == (
        FinishReason.STOP,
        None,
        Usage(2, 6, 1),
        timing(6),
    )


def test_the_callers_stop_id_is_named_and_has_no_text(by_bytes: TextTokenizer):
    asked = request(stop_token_ids=(ord("!"),))
    deltas = run(RequestStream(asked, by_bytes), script(asked, list(b"hey!")))
    assert (text(deltas), deltas[-1].stop_reason) == ("hey", ord("!"))


def test_a_special_token_that_stops_nothing_is_skipped(by_bytes: TextTokenizer):
    asked = request(ignore_eos=True)
    deltas = run(RequestStream(asked, by_bytes), script(asked, [ord("a"), EOS, ord("b"), BOS]))
    assert (text(deltas), ids(deltas)) == ("ab", [97, EOS, 98, BOS])
    assert deltas[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_arrives_once_with_usage_and_timing(by_bytes: TextTokenizer, reason: FinishReason):
    asked = request(stop=("zz",))
    events = script(asked, list(b"abz"), late=0, reason=reason)
    events[-1] = replace(events[-1], error="broken" if reason is FinishReason.ERROR else "")
    deltas = run(RequestStream(asked, by_bytes), events)
    assert text(deltas) == "abz"
    assert [delta.finish for delta in deltas if delta.finish] == [reason]
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(2, 3, 1)]
    assert deltas[-1].error == events[-1].error


def test_an_end_without_a_token_is_one_delta(by_bytes: TextTokenizer):
    asked = request()
    (delta,) = run(RequestStream(asked, by_bytes), script(asked, [], reason=FinishReason.CANCELLED))
    assert (delta.text, delta.token_ids, delta.finish) == ("", (), FinishReason.CANCELLED)


def test_every_choice_ends_once_with_its_own_text(by_bytes: TextTokenizer):
    asked = request(n=3, stop=("x",))
    words = [b"one", b"twx", b"three"]
    scripts = [script(asked, list(word), choice=choice) for choice, word in enumerate(words)]
    turns = [event for at in range(5) for events in scripts for event in events[at : at + 1]]
    deltas = run(RequestStream(asked, by_bytes), turns)
    for choice, expected in enumerate(["one", "tw", "three"]):
        own = [delta for delta in deltas if delta.choice == choice]
        assert text(own) == expected
        assert [delta.finish is not None for delta in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent("other", 0, (SampledToken(97),)),
        TokenEvent("r", 1, (SampledToken(97),)),
        TokenEvent("r", -1, (SampledToken(97),)),
        TokenEvent("r", 0, finish=FinishReason.STOP),
    ],
)
def test_an_event_that_cannot_be_is_an_engine_fault(by_bytes: TextTokenizer, event: TokenEvent):
    with pytest.raises(EngineFault, match="choice"):
        RequestStream(request(), by_bytes).feed(event)


def test_an_event_after_the_end_is_an_engine_fault(by_bytes: TextTokenizer):
    asked = request()
    stream = RequestStream(asked, by_bytes)
    run(stream, script(asked, [EOS]))
    with pytest.raises(EngineFault, match="after its end"):
        stream.feed(TokenEvent("r", 0, (SampledToken(97),)))


# ---- text ------------------------------------------------------------------------------------------------------------


@given(raw=st.binary(max_size=16) | st.text(max_size=6).map(str.encode), group=st.integers(1, 5))
def test_streamed_text_equals_the_decoded_whole(by_bytes: TextTokenizer, raw: bytes, group: int):
    asked = request()
    deltas = run(RequestStream(asked, by_bytes), script(asked, [*raw, EOS], group=group))
    assert text(deltas) == raw.decode("utf-8", "replace")


@given(words=st.text(alphabet="한국어🙂é code(){}\n", max_size=24), group=st.integers(1, 4))
@settings(max_examples=60)
def test_real_tokens_stream_without_broken_characters(smollm: TextTokenizer, words: str, group: int):
    asked = request()
    deltas = run(RequestStream(asked, smollm), script(asked, smollm.encode(words), group=group))
    assert text(deltas) == words
    assert not any("\ufffd" in delta.text for delta in deltas)


# ---- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3])
def test_a_stop_string_cuts_and_waits_for_the_loops_end(by_bytes: TextTokenizer, group: int):
    """The tokens in flight are swallowed; usage and timing count what was taken."""
    asked = request(stop=("END",))
    stream = RequestStream(asked, by_bytes)
    deltas, asked_to_stop = [], []
    for event in script(asked, list(b"ab END"), group=group, late=3, reason=FinishReason.STOP):
        deltas += stream.feed(event)
        asked_to_stop += stream.stopped_choices
    assert asked_to_stop == [0]
    assert (text(deltas), ids(deltas)) == ("ab ", list(b"ab END"))
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.STOP]
    last = deltas[-1]
    assert (last.stop_reason, last.usage, last.timing) == ("END", Usage(2, 6, 1), timing(6))


def test_a_stop_string_in_the_last_event_ends_at_once(by_bytes: TextTokenizer):
    asked = request(stop=("c",))
    stream = RequestStream(asked, by_bytes)
    deltas = run(stream, script(asked, list(b"abcd"), group=4))
    assert stream.stopped_choices == ()
    (last,) = deltas
    assert (last.text, last.token_ids, last.finish, last.stop_reason) == ("ab", (97, 98, 99), FinishReason.STOP, "c")
    assert last.usage == Usage(2, 3, 1)


def test_the_reason_is_the_stop_string_even_where_a_stop_id_was_in_flight(by_bytes: TextTokenizer):
    asked = request(stop=("b",), stop_token_ids=(ord("!"),))
    deltas = run(RequestStream(asked, by_bytes), script(asked, list(b"ab!")))
    assert (text(deltas), ids(deltas), deltas[-1].stop_reason) == ("a", [97, 98], "b")


def test_one_choice_stops_and_the_others_go_on(by_bytes: TextTokenizer):
    asked = request(n=2, stop=("x",))
    stream = RequestStream(asked, by_bytes)
    stream.feed(TokenEvent("r", 1, (SampledToken(ord("x")),)))
    assert stream.stopped_choices == (1,)
    (delta,) = stream.feed(TokenEvent("r", 0, (SampledToken(ord("a")),)))
    assert (delta.text, stream.stopped_choices) == ("a", ())


@given(
    raw=st.text(alphabet="ab", max_size=12),
    stop=st.text(alphabet="ab", min_size=1, max_size=3),
    group=st.integers(1, 4),
    late=st.integers(0, 2),
)
@settings(max_examples=150)
def test_streamed_and_whole_stop_at_the_same_character(
    by_bytes: TextTokenizer, raw: str, stop: str, group: int, late: int
):
    asked = request(stop=(stop,))
    deltas = run(RequestStream(asked, by_bytes), script(asked, list(raw.encode()), group=group, late=late))
    generated = raw + "abc"[:late]
    assert text(deltas) == generated.split(stop)[0]
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage.completion_tokens == len(ids(deltas))


def test_min_tokens_covers_stop_strings(by_bytes: TextTokenizer):
    asked = request(stop=("b",), min_tokens=3)
    deltas = run(RequestStream(asked, by_bytes), script(asked, list(b"abab")))
    assert (text(deltas), len(ids(deltas))) == ("aba", 4)


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def scored(event: TokenEvent) -> TokenEvent:
    tokens = tuple(SampledToken(t.token, -0.5, ((t.token, -0.5), (97, -1.5), (9_999, -2.0))) for t in event.tokens)
    return replace(event, tokens=tokens)


def test_logprob_bytes_join_to_the_text_split_characters_included(by_bytes: TextTokenizer):
    asked = request(logprobs=3, ignore_eos=False)
    raw = "é🙂".encode()
    deltas = run(RequestStream(asked, by_bytes), [scored(event) for event in script(asked, [*raw, EOS])])
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.bytes for entry in logprobs) == text(deltas).encode() == raw
    assert [entry.token for entry in logprobs] == ids(deltas)
    assert [(top.token, top.bytes) for top in logprobs[0].top] == [(raw[0], raw[:1]), (97, b"a"), (9_999, b"")]
    assert {entry.logprob for entry in logprobs} == {-0.5}


def test_logprobs_end_with_the_token_that_completes_a_stop_string(by_bytes: TextTokenizer):
    asked = request(logprobs=1, stop=("bc",))
    events = [scored(event) for event in script(asked, list(b"abcd"), group=4)]
    deltas = run(RequestStream(asked, by_bytes), events)
    assert b"".join(entry.bytes for delta in deltas for entry in delta.logprobs) == b"abc"


def test_no_logprobs_unless_sampled_with_them(by_bytes: TextTokenizer):
    asked = request()
    assert all(not delta.logprobs for delta in run(RequestStream(asked, by_bytes), script(asked, list(b"ab"))))
