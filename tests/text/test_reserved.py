"""Reserved tokens are found where they are whole, and never where a caller spelled them."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text.reserved import ReservedTokens

TOKENS = {"<|a|>": 1, "<|a|>x": 2, "[b]": 3, "<": 4}
SENTINEL = "0123456789"
SPELLED = st.text(alphabet="<|a>x[b] ", max_size=12)


def test_the_leftmost_longest_token_wins():
    assert ReservedTokens(TOKENS).split("<|a|>x [b]<|a|><|") == [2, " ", 3, 1, 4, "|"]


def test_no_tokens_split_nothing():
    assert ReservedTokens({}).split("<|a|>") == ["<|a|>"]
    assert ReservedTokens({"": 0}).split("a") == ["a"]


def test_white_space_is_swallowed_on_the_sides_that_say_so():
    finder = ReservedTokens({"[l]": 1, "[r]": 2, "[n]": 3}, {"[l]": (True, False), "[r]": (False, True)})
    assert finder.split(" a  [l] b [r]  c [n] d [r] ") == [" a", 1, " b ", 2, "c ", 3, " d ", 2]


@given(st.lists(SPELLED, min_size=1, max_size=4))
def test_broken_up_texts_hold_no_token_even_side_by_side(texts: list[str]):
    """`<|` is a token's head and `|>` another's tail: the seams between a caller's texts are safe too."""
    finder = ReservedTokens({key: value for key, value in TOKENS.items() if key != "<"})
    together = "".join(finder.break_up(text, SENTINEL) for text in texts)
    assert finder.split(together) in ([together], [])
    assert together.replace(SENTINEL, "") == "".join(texts)


def test_a_token_inside_another_is_broken_up_too():
    """What is left of `<<s>>` without its first character is a token itself."""
    for tokens, text in (({"<<s>>": 1, "<s>": 2}, "<<s>>"), ({"<a>": 1, "><b": 2}, "<a><b")):
        finder = ReservedTokens(tokens)
        broken = finder.break_up(text, SENTINEL)
        assert finder.split(broken) == [broken]
        assert broken.replace(SENTINEL, "") == text


@given(SPELLED)
def test_splitting_loses_nothing(text: str):
    spelling = {token: spelled for spelled, token in TOKENS.items()}
    parts = ReservedTokens(TOKENS).split(text)
    assert "".join(part if isinstance(part, str) else spelling[part] for part in parts) == text


def test_only_what_unicode_calls_white_space_is_swallowed():
    tokens = ReservedTokens({"<e>": 7}, {"<e>": (True, True)})
    assert tokens.split("a \x1c \u3000<e>\u2003\x85\x1f b<e>\x1e") == ["a \x1c", 7, "\x1f b", 7, "\x1e"]
