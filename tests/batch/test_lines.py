"""Lines of every kind, and every field in them: honoured, or refused by name."""

import io
import json

import pytest

from jaxinfer import SamplingParams
from jaxinfer.batch.lines import MAX_LINE_BYTES, Line, parse_line, read_lines

DEFAULTS = SamplingParams(max_tokens=6, temperature=0.0)


def openai(url: str, body: dict, **more) -> dict:
    return {"custom_id": "c", "method": "POST", "url": f"/v1/{url}", "body": body, **more}


def parsed(line: dict | bytes):
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(Line(1, data), DEFAULTS, lambda name: name == "demo")


# ---- reading lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"a\nb\n", b"a\nb", b"a\r\nb\r\n", b"\xef\xbb\xbfa\nb\n", b"\n\na\n   \n\r\nb\n\n", b"\xef\xbb\xbf\na\nb"]
)
def test_line_ends_marks_and_blank_lines_make_no_difference(data):
    assert [line.data.strip() for line in read_lines(io.BytesIO(data))] == [b"a", b"b"]


def test_lines_are_numbered_as_an_editor_does():
    assert [line.number for line in read_lines(io.BytesIO(b"\n\na\n\nb"))] == [3, 5]


def test_a_line_without_end_is_cut_and_refused_and_the_next_one_is_read():
    data = b'"' + b"x" * (2 * MAX_LINE_BYTES) + b'"\n{"prompt": "a"}'
    first, second = read_lines(io.BytesIO(data))
    assert len(first.data) == MAX_LINE_BYTES + 1
    assert "longer than" in parsed(first.data).error
    assert parsed(second.data).prompts == ("a",)


# ---- reading one line ------------------------------------------------------------------------------------------------

GOOD = {"prompt": "bell"}
REFUSED = {
    b"{": "no JSON",
    b"[1]": "list",
    b'{"prompt": "\xff"}': "UTF-8",
    b'{"prompt": "a", "top_p": NaN}': "NaN",
    b"[" * 100_000: "no JSON",
    b'{"prompt": "a", "temperature": ' + b"[" * 900 + b"]" * 900 + b"}": "deep",
    b'{"prompt": "a", "temperature": [' + b"[]," * 100_000 + b"[]]}": "temperature",
    b'{"prompt": "a", "id": ' + b'{"a":' * 40 + b"1" + b"}" * 41: "deep",
    b'{"prompt": "a", "id": 1e400}': "1e400",
    b'{"custom_id": -1e400, "body": {}}': "1e400",
    b'{"prompt": "a", "prompt": "b"}': "'prompt' is given twice",
    b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}': "'role' is given twice",
    b'{"prompt": "a", "seed": -' + b"9" * 4000 + b"}": "seed",
    b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}': "logit_bias",
    b'{"prompt": "a", "logit_bias": {"2147483648": 1}}': "logit_bias",
    b'{"prompt": "a", "logit_bias": {"1.5": 1}}': "logit_bias",
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.items(), ids=range(len(REFUSED)))
def test_damaged_lines_are_refused_with_a_reason(data, reason):
    ask = parsed(data)
    assert reason in ask.error
    assert ask.prompts == ()
    assert len(ask.error) < 1_000


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({}, "prompt"),
        ({**GOOD, "messages": []}, "exactly one"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({**GOOD, "temprature": 1}, "temprature"),
        ({**GOOD, "temprature": None}, "temprature"),
        ({**GOOD, "temperature": "1"}, "temperature"),
        ({**GOOD, "max_tokens": 0}, "max_tokens"),
        ({**GOOD, "max_tokens": 5.0}, "max_tokens"),
        ({**GOOD, "max_tokens": True}, "max_tokens"),
        ({**GOOD, "top_p": 0}, "top_p"),
        ({**GOOD, "stop": 5}, "stop"),
        ({**GOOD, "stop": [""]}, "stop"),
        ({**GOOD, "stop_token_ids": 5}, "stop_token_ids"),
        ({**GOOD, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({**GOOD, "logit_bias": [1]}, "logit_bias"),
        ({**GOOD, "logit_bias": {"5": "x"}}, "logit_bias"),
        ({**GOOD, "logit_bias": {"--5": 1}}, "logit_bias"),
        ({**GOOD, "logit_bias": {"-": 1}}, "logit_bias"),
        ({**GOOD, "ignore_eos": "no"}, "ignore_eos"),
        ({**GOOD, "seed": 2**63}, "seed"),
        ({**GOOD, "id": [1]}, "id"),
        ({**GOOD, "id": True}, "id"),
        ({"custom_id": "a"}, "url"),
        (openai("embeddings", GOOD), "url"),
        (openai("completions", GOOD, method="GET"), "method"),
        (openai("completions", GOOD, extra=1), "extra"),
        ({**openai("completions", GOOD), "custom_id": 5}, "custom_id"),
        ({**openai("completions", GOOD), "custom_id": ""}, "custom_id"),
        (openai("completions", []), "body"),
        (openai("completions", {}), "prompt"),
        (openai("completions", {"prompt": []}), "prompt"),
        (openai("completions", {"prompt": {}}), "prompt"),
        (openai("completions", {**GOOD, "model": "gpt-9"}), "gpt-9"),
        (openai("completions", {**GOOD, "stream": True}), "stream"),
        (openai("completions", {**GOOD, "echo": True}), "echo"),
        (openai("completions", {**GOOD, "suffix": "x"}), "suffix"),
        (openai("completions", {**GOOD, "best_of": 2}), "best_of"),
        (openai("completions", {**GOOD, "tools": []}), "tools"),
        (openai("chat/completions", GOOD), "messages"),
        (openai("chat/completions", {"messages": [{}], "logprobs": 3}), "logprobs"),
        (openai("chat/completions", {"messages": [{}], "top_logprobs": 3}), "top_logprobs"),
        (openai("chat/completions", {"messages": [{}], "max_tokens": 1, "max_completion_tokens": 1}), "max_tokens"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(line, name):
    assert name in parsed(line).error


def test_every_sampling_field_of_a_line_is_honoured():
    given = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 4,
        "n": 2,
        "ignore_eos": True,
        "logprobs": 1,
    }
    line = {**GOOD, **given, "stop": "x", "stop_token_ids": [7], "logit_bias": {"5": -1}}
    expected = SamplingParams(**given, stop=("x",), stop_token_ids=(7,), logit_bias={5: -1})
    assert parsed(line).params == expected
    assert set(line) - {"prompt"} == set(SamplingParams.__dataclass_fields__)
    assert parsed(openai("completions", line)).params == expected
    chat = {**line, "messages": [{}], "logprobs": True, "top_logprobs": 1}
    del chat["prompt"]
    assert parsed(openai("chat/completions", chat)).params == expected


def test_fields_left_out_or_null_come_from_the_defaults():
    assert parsed({**GOOD, "temperature": None, "stop": None}).params == DEFAULTS
    neutral = {"model": "demo", "stream": False, "echo": False, "suffix": None, "best_of": 1, "n": None}
    assert parsed(openai("completions", {**GOOD, **neutral})).params == DEFAULTS


def test_a_refused_line_keeps_its_id():
    assert parsed({**GOOD, "id": "mine", "nonsense": 1}).id == "mine"
    assert parsed(openai("completions", {"nonsense": 1})).id == "c"
    assert parse_line(Line(7, b"{"), DEFAULTS, bool).id == "line-7"
