"""The command line in this process: what is printed where, which exit code, and that every flag does something."""

import dataclasses
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import CacheConfig, EngineConfig, MeshConfig, SamplingParams
from jaxinfer.checkpoint.load import load_config
from jaxinfer.cli import app, chat, generate, main
from jaxinfer.cli.chat import Conversation
from jaxinfer.cli.flags import engine_config, sampling_params
from jaxinfer.cli.plan import plan_chip, weight_bytes
from jaxinfer.errors import BadSamplingParam, Unavailable
from jaxinfer.llm import LLM
from jaxinfer.roofline import CHIPS, Chip, kv_bytes_per_token, total_weights

COMMANDS = ("generate", "chat", "serve", "batch", "convert", "plan", "bench")
FLAGS = ["--slots=4", "--context=96", "--chunk=32", "--page-size=16", "--pages=24"]
ENGINE = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))
GREEDY = ["-t", "0", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def llm(tiny_path) -> LLM:
    return LLM.load(str(tiny_path), ENGINE, progress=False)


@pytest.fixture
def model(llm, tiny_path, monkeypatch) -> list[str]:
    """Flags that name the tests' model; it is loaded once for all tests."""

    def load(ref, engine, **options):
        assert (ref, engine) == (str(tiny_path), ENGINE)
        return llm

    monkeypatch.setattr(LLM, "load", load)
    return ["-m", str(tiny_path), *FLAGS]


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return exit_.value.code or 0


# ---- manual, version, errors -----------------------------------------------------------------------------------------


def test_help_needs_neither_jax_nor_grpc():
    heavy = "{'jax', 'numpy', 'grpc', 'rich', 'flax'} & set(sys.modules)"
    probe = f"import sys\nfrom jaxinfer.cli import main\ntry: main(['--help'])\nfinally: print({heavy})"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert all(command in result.stdout for command in COMMANDS)
    assert result.stdout.endswith("set()\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_s_help_has_an_example(command, capsys):
    assert code(command, "--help") == 0
    assert f"\n  jaxinfer {command}" in capsys.readouterr().out


def test_the_registered_commands_are_those_of_the_manual():
    assert {command.name for command in app.registered_commands} == set(COMMANDS)


def test_version(capsys):
    assert code("--version") == 0
    assert capsys.readouterr().out == f"jaxinfer {jaxinfer.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["generate", "x", "--nonsense"], "--nonsense"),
        (["generate", "x", "--max-tokens", "many"], "'--max-tokens': Input should be a valid integer"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias is '5'"),
        (["generate", "x", "--slots", "0"], "slots is 0"),
        (["generate", "x", "-m", "/no/such/model"], "/no/such/model"),
        (["generate", "x", "--system", "y"], "--chat"),
        (["generate", "x", "--logprobs", "1"], "--json"),
        (["generate", "x", "--server", "localhost:1", "--slots", "4"], "--server"),
        (["generate", "x", "--server", "localhost:1", "-m", "other"], "--server"),
        (["chat", "--n", "2"], "--n"),
        (["batch", "/no/such/input", "out"], "/no/such/input"),
        (["bench", "--output", "1"], "output 1"),
        (["convert", "demo", "."], "exists"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(arguments, said, capsys):
    assert code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_other_failures_have_exit_code_1(monkeypatch, capsys):
    def broken(*_):
        raise Unavailable("the server is draining")

    monkeypatch.setattr(generate, "open_source", broken)
    assert code("generate", "x") == 1
    assert capsys.readouterr().err == "jaxinfer: the server is draining\n"


def test_python_m_is_the_same_command():
    result = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"jaxinfer {jaxinfer.__version__}\n"


# ---- flags -----------------------------------------------------------------------------------------------------------

SAMPLING = {
    "max_tokens": 7,
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


def test_every_sampling_parameter_has_a_flag_that_sets_it():
    made = sampling_params(**SAMPLING, logit_bias=["5=-1.5", "6=2"], stop=["x", "y"], stop_token_id=[7, 8])
    rest = {"logit_bias": {5: -1.5, 6: 2.0}, "stop": ("x", "y"), "stop_token_ids": (7, 8)}
    assert made == SamplingParams(**SAMPLING, **rest)
    assert SAMPLING.keys() | rest.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    assert sampling_params() == SamplingParams()
    with pytest.raises(BadSamplingParam, match="ID=BIAS"):
        sampling_params(logit_bias=["x=y"])


def test_every_engine_setting_has_a_flag_that_sets_it():
    own = {"slots": 2, "context": 64, "chunk": 16, "queue": 3, "dtype": "bfloat16", "deterministic": True}
    cache = {"page_size": 16, "pages": 5, "memory_fraction": 0.5}
    made = engine_config(**own, **cache, prefix_cache=False, tensor=2)
    assert made == EngineConfig(**own, prefix_cache=False, cache=CacheConfig(**cache), mesh=MeshConfig(tensor=2))
    assert {*own, "prefix_cache", "cache", "mesh"} == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(cache) == {field.name for field in dataclasses.fields(CacheConfig)}
    assert {field.name for field in dataclasses.fields(MeshConfig)} == {"tensor"}
    assert engine_config() == EngineConfig()


# ---- generate --------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_its_timing_apart(llm, model, capsys):
    assert code("generate", "By day", *model, *GREEDY) == 0
    captured = capsys.readouterr()
    output = llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0))[0]
    assert captured.out == output.text + "\n"
    prompt, made = len(output.prompt_token_ids), len(output.token_ids)
    assert captured.err.startswith(f"{prompt} + {made} tokens")
    assert all(word in captured.err for word in ("TTFT", "TPOT", "tok/s", output.finish.value))


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_generate_reads_standard_input(model, argument, capsys, monkeypatch):
    assert code("generate", "By day", *model, *GREEDY) == 0
    given = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("By day"))
    assert code("generate", *argument, *model, *GREEDY) == 0
    assert capsys.readouterr().out == given


def test_generate_prints_one_json_object(llm, model, capsys):
    assert code("generate", "By day", *model, *GREEDY, "--json", "--logprobs", "1") == 0
    record = json.loads(capsys.readouterr().out)
    output = llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0, logprobs=1))[0]
    assert (record["text"], record["token_ids"]) == (output.text, list(output.token_ids))
    assert record["finish_reason"] == output.finish.value
    assert len(record["logprobs"]) == len(output.token_ids)


def test_generate_prints_every_choice(llm, model, capsys):
    assert code("generate", "bell", *model, "-t", "9", "--seed", "1", "--max-tokens", "8", "--n", "2") == 0
    out = capsys.readouterr().out
    output = llm.generate(["bell"], SamplingParams(max_tokens=8, temperature=9.0, seed=1, n=2))[0]
    for index, choice in enumerate(output.choices):
        assert f"--- {index + 1} of 2 ({choice.finish.value})\n{choice.text}\n" in out


def test_chat_without_a_template_is_refused(model, capsys):
    assert code("generate", "hello", *model, "--chat") == 2
    assert "no chat template" in capsys.readouterr().err


# ---- chat ------------------------------------------------------------------------------------------------------------


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


def test_chat_opens_the_model_that_is_named(llm, model, monkeypatch, capsys):
    monkeypatch.setattr(chat, "input", lambda prompt: "/exit", raising=False)
    _, ref, *engine = model
    assert code("chat", ref, *engine) == 0
    assert "/exit" in capsys.readouterr().err


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_says_what_fits_and_how_fast_without_loading(tiny_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxinfer.checkpoint.load.load", lambda *_, **__: pytest.fail("a weight is read"))
    arguments = ["plan", str(tiny_path), "--page-size", "16", "--chunk", "32"]
    assert code(*arguments, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["chip"] for row in rows} == set(CHIPS)
    config = load_config(str(tiny_path))
    norms = (2 * config.layers + 1) * config.width * 4
    assert {row["weight_bytes"] for row in rows} == {2 * total_weights(config) + norms}
    assert {row["page_bytes"] for row in rows} == {16 * kv_bytes_per_token(config, 2)}
    assert code(*arguments, "--chip", "H100", "--chip", "L4") == 0
    out = capsys.readouterr().out
    assert "8 executables" in out  # one seat, one prefill of 32 tokens, decodes of 1, 2, 4 ... 32 rows
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:] == ["H100", "L4"]
    assert code(*arguments, "--chip", "abacus") == 2


def test_plan_splits_over_devices_and_says_what_does_not_fit(tiny_path):
    config = load_config(str(tiny_path))
    alone, both = (weight_bytes(config, "float32", devices) for devices in (1, 2))
    assert alone / 2 < both < alone  # all but the norms is split
    tight = Chip("tight", 1e12, 1e9, memory=alone + 100)
    engine = dataclasses.replace(ENGINE, dtype="float32")
    assert plan_chip(config, engine, alone, tight).pages is None
    assert plan_chip(config, engine, alone, CHIPS["L4"]).pages == ENGINE.cache.pages


# ---- serve -----------------------------------------------------------------------------------------------------------


def test_serve_answers_generate_and_chat_until_it_is_told_to_stop(llm, tiny_path, capsys):
    command = [sys.executable, "-m", "jaxinfer", "serve", str(tiny_path), "--port", "0", "--grace", "5", *FLAGS]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        target = server.stdout.readline().removeprefix("listening on ").strip()
        assert server.stdout.readline().startswith("ready: ")
        assert code("generate", "By day", "--server", target, *GREEDY) == 0
        captured = capsys.readouterr()
        assert captured.out == llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0))[0].text + "\n"
        assert "tok/s" in captured.err
        assert code("generate", "By day", "--server", target, *GREEDY, "--json", "--n", "2") == 0
        assert len(json.loads(capsys.readouterr().out)["choices"]) == 2
        assert code("generate", "x" * 500, "--server", target) == 2
        assert "context of 96 tokens" in capsys.readouterr().err
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert code("generate", "By day", "--server", target) == 1
    finally:
        server.kill()
        server.communicate()


# ---- batch, convert, bench -------------------------------------------------------------------------------------------


def test_batch_answers_a_file(model, tmp_path, capsys):
    (tmp_path / "in").write_text('{"prompt": "bell"}\n{"prompt": "bell", "x": 1}\n')
    arguments = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), *model, *GREEDY]
    assert code(*arguments) == 3
    assert "1 of 2 lines failed" in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["error"] is None for record in records] == [True, False]
    (tmp_path / "in").write_text('{"prompt": "bell"}\n')
    assert code(*arguments) == 2
    assert code(*arguments, "--overwrite") == 0


def test_convert_makes_a_checkpoint_that_says_the_same(llm, tiny_path, tmp_path, capsys):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    assert "read back equal" in capsys.readouterr().out
    again = LLM.load(str(target), ENGINE, progress=False)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert again.generate(["By day"], params)[0].token_ids == llm.generate(["By day"], params)[0].token_ids
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_convert_replaces_only_what_it_may(tiny_path, tmp_path, capsys):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    assert code("convert", str(tiny_path), str(target)) == 2
    assert code("convert", str(tiny_path), str(target), "--force", "--dtype", "bfloat16") == 0
    assert code("convert", str(target), str(target), "--force") == 2
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    assert code("convert", str(tiny_path), str(precious), "--force") == 2
    assert (precious / "file").read_text() == "mine"
    assert "--force does not replace it" in capsys.readouterr().err


def test_a_copy_that_differs_is_found_out(tiny_path, tmp_path, monkeypatch, capsys):
    from jaxinfer.checkpoint import load as loading

    save = loading.save_orbax

    def damaged(checkpoint, directory: Path) -> None:
        params = {**checkpoint.params, "final_norm": checkpoint.params["final_norm"] + 1}
        save(dataclasses.replace(checkpoint, params=params), directory)

    monkeypatch.setattr(loading, "save_orbax", damaged)
    assert code("convert", str(tiny_path), str(tmp_path / "copy")) == 2
    assert "final_norm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bench_measures_each_number_of_streams(llm, model, monkeypatch, capsys):
    monkeypatch.setattr("jaxinfer.bench.READ_BYTES", 2**20)
    monkeypatch.setattr(LLM, "load", lambda ref, engine: llm)
    _, ref, *_ = model
    sizes = ["--streams", "1", "--streams", "3", "--prompt", "40", "--output", "5"]
    assert code("bench", ref, *sizes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["itl_p50"] <= row["itl_p99"]
        assert row["decode_bound"] > 0
        assert row["decode_limit"] in ("compute", "memory")
    assert code("bench", ref, *sizes) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("|")] == ["streams", "--:", "1", "3"]
    assert code("bench", ref, "--streams", "5") == 2
    assert code("bench", ref, "--streams", "1", "--prompt", "95") == 2
