"""`chat`: the conversation and its commands."""

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.cli import chat
from jaxinfer.cli.chat import Conversation
from jaxinfer.errors import DeadlineExceeded, EngineFault, Overloaded, Unavailable


class Echo:
    """Answers with what was said last; counts the messages it was sent; Ctrl-C comes where `stop_after` says."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.sent, self.closed = [], False

    def stream(self, messages, params):
        self.sent.append(messages)
        return Words(self, messages[-1]["content"].split())


class Words:
    def __init__(self, echo: Echo, words: list[str]) -> None:
        self.echo, self.words, self.given = echo, iter(words), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.echo.stop_after:
            raise KeyboardInterrupt
        self.given += 1
        return jaxinfer.Delta(0, next(self.words) + " ")

    def close(self) -> None:
        self.echo.closed = True


def talk(monkeypatch, echo: Echo, *said: str, system: str | None = None) -> Conversation:
    lines = iter(said)

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", typed)
    conversation = Conversation(echo, SamplingParams(), system)
    conversation.run()
    return conversation


def test_a_conversation_remembers_both_sides(monkeypatch, capsys):
    echo = Echo()
    conversation = talk(monkeypatch, echo, "hello there", "", "^C", "again", system="be brief")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[2]["content"] == "hello there "
    assert [len(messages) for messages in echo.sent] == [2, 4]
    assert "hello there" in capsys.readouterr().out


def test_reset_forgets_and_exit_leaves(monkeypatch):
    echo = Echo()
    conversation = talk(monkeypatch, echo, "one", "/reset", "two", "/help", "/what", "/exit", "never", system="s")
    assert [len(messages) for messages in echo.sent] == [2, 2]
    assert [message["content"] for message in conversation.messages] == ["s", "two", "two "]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_seen(monkeypatch):
    echo = Echo(stop_after=2)
    conversation = talk(monkeypatch, echo, "one two three")
    assert echo.closed
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two "}


def test_a_refused_turn_is_not_remembered(llm, monkeypatch, capsys):
    conversation = talk(monkeypatch, llm, "hello")
    assert conversation.messages == []
    assert "no chat template" in capsys.readouterr().out


@pytest.mark.parametrize("error", [Overloaded("busy"), Unavailable("away"), DeadlineExceeded("late")])
def test_a_server_that_cannot_answer_now_does_not_end_the_conversation(monkeypatch, capsys, error):
    class Busy(Echo):
        def stream(self, messages, params):
            words = super().stream(messages, params)
            if len(self.sent) == 2:
                raise error
            return words

    echo = Busy()
    conversation = talk(monkeypatch, echo, "one", "two", "three")
    assert [message["content"] for message in conversation.messages] == ["one", "one ", "three", "three "]
    assert f"({error})" in capsys.readouterr().out


def test_an_engine_that_broke_ends_the_conversation(monkeypatch):
    class Broken(Echo):
        def stream(self, messages, params):
            raise EngineFault("gone")

    with pytest.raises(EngineFault):
        talk(monkeypatch, Broken(), "one")


def test_chat_opens_the_model_that_is_named(code, llm, model, monkeypatch, capsys):
    monkeypatch.setattr(chat, "input", lambda prompt: "/exit", raising=False)
    _, ref, *engine = model
    assert code("chat", ref, *engine) == 0
    assert "/exit" in capsys.readouterr().err
