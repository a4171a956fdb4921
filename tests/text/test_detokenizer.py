"""Text that comes in pieces is the text that comes at once, whatever the pieces and wherever it stops."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import TextTokenizer

LETTERS = st.text(alphabet="한국어🙂é👩‍👩‍👧 ab\n", min_size=1, max_size=20)


def pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """What `push` returns for `ids` cut at `cuts`, and `finish` at the end."""
    edges = [0, *sorted(cuts), len(ids)]
    return [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)] + [detokenizer.finish()]


def ids_and_cuts(tokenizer: TextTokenizer) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    low = min(1000, tokenizer.vocab_size)  # bytes and control tokens lie there
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, low - 1), max_size=16)
    return ids.flatmap(lambda ids: st.tuples(st.just(ids), st.lists(st.integers(0, len(ids)), max_size=5)))


# ---- joined pieces = the whole ---------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=80)
def test_any_ids_in_any_split_give_the_decoded_text(tokenizer: TextTokenizer, data: st.DataObject):
    ids, cuts = data.draw(ids_and_cuts(tokenizer))
    assert "".join(pieces(Detokenizer(tokenizer, ()), ids, cuts)) == tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=80)
def test_prompt_and_output_join_to_the_decoded_whole(tokenizer: TextTokenizer, data: st.DataObject):
    prompt = tokenizer.encode(data.draw(LETTERS | st.just("")), special=data.draw(st.booleans()))
    ids, cuts = data.draw(ids_and_cuts(tokenizer))
    text = "".join(pieces(Detokenizer(tokenizer, prompt), ids, cuts))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


@given(data=st.data())
@settings(max_examples=80)
def test_no_replacement_character_inside_a_character(tokenizer: TextTokenizer, data: st.DataObject):
    text = data.draw(LETTERS)
    ids = tokenizer.encode(text, bos=False)
    sent = pieces(Detokenizer(tokenizer, ()), ids, list(range(len(ids))))
    assert "".join(sent) == text
    assert not any("\ufffd" in piece for piece in sent)


def test_one_byte_at_a_time(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (256,))
    sent = [detokenizer.push([byte]) for byte in "🙂é한".encode()]
    assert sent == ["", "", "", "🙂", "", "é", "", "", "한"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    "raw", [b"\xff\xc0\x80", b"\xe0\x80a", b"\xf0\x9f\x99", b"\xed\x95", b"a\xc3\xc3\xa9", b"\x80"]
)
def test_invalid_bytes_count_as_python_counts_them(by_bytes: TextTokenizer, raw: bytes):
    for cuts in ([], list(range(len(raw)))):
        assert "".join(pieces(Detokenizer(by_bytes, ()), list(raw), cuts)) == raw.decode("utf-8", "replace")


def test_an_end_inside_a_character_is_one_replacement_character(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (256,))
    assert detokenizer.push(list("é한".encode()[:-1])) == "é"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_the_output_completes_what_the_prompt_left_unfinished(by_bytes: TextTokenizer):
    raw = "aa한".encode()
    assert Detokenizer(by_bytes, [256, *raw[:-1]]).push([raw[-1], ord("b")]) == "한b"


@given(st.binary(max_size=12), st.binary(max_size=6))
@example(b"\xf0\x9f\x99", b"\x82")
def test_unfinished_prompts_of_any_bytes(by_bytes: TextTokenizer, prompt: bytes, output: bytes):
    """The text is what the whole gains over the prompt's finished characters."""
    detokenizer = Detokenizer(by_bytes, list(prompt))
    text = detokenizer.push(list(output)) + detokenizer.finish()
    whole = (prompt + output).decode("utf-8", "replace")
    finished = codecs.getincrementaldecoder("utf-8")("replace").decode(prompt)
    assert finished + text == whole


def test_special_tokens_and_padding_ids_have_no_text(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, ())
    assert detokenizer.push([ord("a"), 257, 10**6, 0xED, 256, 0x95, 0x9C]) == "a한"


def test_leading_space_stays_after_a_prompt_and_goes_without_one(mistral_v1: TextTokenizer):
    (word,) = mistral_v1.encode("the", bos=False)
    assert Detokenizer(mistral_v1, mistral_v1.encode("in")).push([word, word]) == " the the"
    assert Detokenizer(mistral_v1, mistral_v1.encode("")).push([word, word]) == "the the"
    assert Detokenizer(mistral_v1, ()).push([1, word]) == "the"


class Counting:
    """A tokenizer that counts what a detokenizer asks of it."""

    def __init__(self, inner: TextTokenizer) -> None:
        self.inner = inner
        self.decoded = 0
        self.asked = 0
        self.vocab_size, self.special_tokens = inner.vocab_size, inner.special_tokens
        self.bos_token = inner.bos_token

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self.inner.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        self.asked += 1
        return self.inner.token_bytes(token)


def test_each_token_is_looked_at_once(mistral_v1: TextTokenizer):
    """Nothing is decoded again, however long the output and the prompt are."""
    counting = Counting(mistral_v1)
    ids = mistral_v1.encode("the cat 한국어 " * 50, bos=False)
    detokenizer = Detokenizer(counting, ids * 20, stop=["zzz"])
    detokenizer.push(ids)
    assert counting.asked <= len(ids) + 4
    assert counting.decoded <= 1


# ---- stop strings ----------------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """By definition: the stop string that is complete first, not before `min_tokens` characters (here: tokens)."""
    for end in range(max(min_tokens, 1), len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="ab", max_size=24),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 12),
    data=st.data(),
)
@settings(max_examples=400)
def test_stop_strings_cut_where_the_definition_says(
    by_bytes: TextTokenizer, text: str, stops: list[str], min_tokens: int, data: st.DataObject
):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    expected, hit = cut(text, stops, min_tokens)
    detokenizer = Detokenizer(by_bytes, (256,), stops, min_tokens)
    sent = pieces(detokenizer, list(text.encode()), cuts)
    assert "".join(sent) == expected
    assert detokenizer.stopped == hit


@given(data=st.data(), text=LETTERS, stop=st.text(alphabet="한국어🙂é b\n", min_size=1, max_size=3))
@settings(max_examples=60)
def test_stop_strings_cut_real_tokens_at_the_character(
    tokenizer: TextTokenizer, data: st.DataObject, text: str, stop: str
):
    ids = tokenizer.encode(text, bos=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert "".join(pieces(Detokenizer(tokenizer, (), [stop]), ids, cuts)) == text.split(stop)[0]


def test_nothing_of_a_stop_string_is_ever_sent(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (), ["<END>"])
    sent = [detokenizer.push([byte]) for byte in b"ab<EN<END>c"]
    assert sent == ["a", "b", "", "", "", "<EN", "", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.tokens, detokenizer.finish()) == ("<END>", 10, "")


def test_what_was_held_back_comes_at_the_end(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (), ["<END>"])
    assert detokenizer.push(list(b"ab<EN")) == "ab"
    assert detokenizer.finish() == "<EN"
    assert detokenizer.stopped is None


def test_a_stop_string_inside_one_token_cuts_inside_it(smollm: TextTokenizer):
    (token,) = smollm.encode(" Paris")
    detokenizer = Detokenizer(smollm, smollm.encode("in"), ["ri"])
    assert detokenizer.push([token, token]) == " Pa"
    assert (detokenizer.stopped, detokenizer.tokens, detokenizer.finish()) == ("ri", 1, "")


def test_a_stop_string_across_two_tokens_is_found(smollm: TextTokenizer):
    ids = smollm.encode("Hello world")
    assert len(ids) == 2
    detokenizer = Detokenizer(smollm, (), ["lo wor"])
    assert [detokenizer.push([token]) for token in ids] == ["Hel", ""]
    assert detokenizer.stopped == "lo wor"


def test_a_stop_string_before_min_tokens_is_text_and_a_later_one_stops(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (), ["END"], min_tokens=4)
    assert detokenizer.push(list(b"ENDxENDy")) == "ENDx"
    assert (detokenizer.stopped, detokenizer.tokens) == ("END", 7)


def test_the_prompt_is_not_searched(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, list(b"EN"), ["END"])
    assert detokenizer.push(list(b"D ok")) == "D ok"


def test_a_replacement_character_can_be_a_stop_string(by_bytes: TextTokenizer):
    detokenizer = Detokenizer(by_bytes, (), ["\ufffd"])
    assert detokenizer.push([ord("a"), 0xED]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "\ufffd"
