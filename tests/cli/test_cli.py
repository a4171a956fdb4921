"""The manual, the exit codes, and that every flag does something."""

import dataclasses
import errno
import io
import subprocess
import sys

import pytest

import jaxinfer.batch.job
import jaxinfer.checkpoint.load
import jaxinfer_server.launch
from jaxinfer import CacheConfig, EngineConfig, MeshConfig, SamplingParams
from jaxinfer.batch.job import Summary
from jaxinfer.checkpoint.generation import Generation
from jaxinfer.cli import app, generate
from jaxinfer.cli.flags import engine_config, sampling_params
from jaxinfer.errors import BadSamplingParam, ConfigError, Unavailable

RECOMMENDED = {"temperature": 0.5, "top_k": 7}
COMMANDS = ("generate", "chat", "serve", "batch", "convert", "plan", "bench", "eval", "doctor")


def test_help_needs_neither_jax_nor_grpc():
    heavy = "{'jax', 'numpy', 'grpc', 'rich', 'flax'} & set(sys.modules)"
    probe = f"import sys\nfrom jaxinfer.cli import main\ntry: main(['--help'])\nfinally: print({heavy})"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert all(command in result.stdout for command in COMMANDS)
    assert result.stdout.endswith("set()\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_s_help_has_an_example(code, command, capsys):
    assert code(command, "--help") == 0
    assert f"\n  jaxinfer {command}" in capsys.readouterr().out


def test_the_registered_commands_are_those_of_the_manual():
    assert {command.name for command in app.registered_commands} == set(COMMANDS)


def test_version(code, capsys):
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
        (["generate", "x", "--server", "localhost:1", "--slots", "4"], "--slots"),
        (["generate", "x", "--server", "localhost:1", "--slots", "32"], "--slots"),
        (["generate", "x", "--server", "localhost:1", "--no-prefix-cache"], "--prefix-cache"),
        (["generate", "x", "--server", "localhost:1", "-m", "demo"], "--model"),
        (["chat", "demo", "--server", "localhost:1"], "REF"),
        (["chat", "--n", "2"], "--n"),
        (["batch", "/no/such/input", "out"], "/no/such/input"),
        (["bench", "--output", "1"], "output 1"),
        (["bench", "--streams", "33"], "--slots"),
        (["convert", "demo", "."], "exists"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(code, arguments, said, capsys):
    assert code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_other_failures_have_exit_code_1(code, monkeypatch, capsys):
    def broken(*_):
        raise Unavailable("the server is draining")

    monkeypatch.setattr(generate, "open_source", broken)
    assert code("generate", "x") == 1
    assert capsys.readouterr().err == "jaxinfer: the server is draining\n"


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        (["generate", "x"], 1),
        (["generate", "x", "--n", "3"], 3),
        (["generate", "x", "--slots", "32"], 32),
        (["chat"], 1),
        (["chat", "--slots", "2"], 2),
        (["batch", "IN", "OUT"], 32),
    ],
)
def test_one_prompt_does_not_wait_for_shapes_that_it_cannot_use(code, arguments, slots, tmp_path, monkeypatch):
    engines = []

    def load(ref, engine, **options):
        engines.append(engine)
        raise Unavailable("enough")

    monkeypatch.setattr(jaxinfer.LLM, "load", load)
    (tmp_path / "IN").write_text('{"prompt": "x"}')
    monkeypatch.chdir(tmp_path)
    assert code(*arguments) == 1
    assert engines == [EngineConfig(slots=slots)]


def test_a_chat_lists_no_flag_that_it_refuses(code, capsys):
    assert code("chat", "--help") == 0
    listed = capsys.readouterr().out
    assert "--top-p" in listed
    assert "--n " not in listed
    assert "--logprobs" not in listed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], SamplingParams()),
        (["--sampling", "none"], SamplingParams()),
        (["--sampling", "checkpoint"], SamplingParams(temperature=0.5, top_k=7)),
        (["--sampling", "checkpoint", "-t", "1.0"], SamplingParams(top_k=7)),
        (["--sampling", "checkpoint", "--top-p", "0.5"], SamplingParams(temperature=0.5, top_k=7, top_p=0.5)),
    ],
)
def test_the_checkpoint_s_sampling_is_taken_where_asked_and_where_no_flag_says(code, flags, expected, monkeypatch):
    """A flag that is given counts, be it equal to its default."""
    asked = []

    def streamed(source, prompt, params):
        asked.append(params)

    monkeypatch.setattr(jaxinfer.checkpoint.load, "load_generation", lambda ref: Generation(sampling=RECOMMENDED))
    monkeypatch.setattr(jaxinfer.LLM, "load", lambda *_, **__: None)
    monkeypatch.setattr(generate, "_print_stream", streamed)
    assert code("generate", "x", *flags) == 0
    assert asked == [expected]


def test_serve_and_batch_take_the_checkpoint_s_sampling_too(code, monkeypatch):
    taken = []

    def serve(ref, engine, options, *, sampling, progress):
        taken.append(sampling)
        return 0

    def run_file(load, ref, source, target, params, **options):
        taken.append(params)
        return Summary(0, 0)

    monkeypatch.setattr(jaxinfer_server.launch, "serve", serve)
    monkeypatch.setattr(jaxinfer.batch.job, "run_file", run_file)
    monkeypatch.setattr(jaxinfer.checkpoint.load, "load_generation", lambda ref: Generation(sampling=RECOMMENDED))
    for flags in ([], ["--sampling", "checkpoint"]):
        assert code("serve", "demo", *flags) == 0
        assert code("batch", "IN", "OUT", "--max-tokens", "5", *flags) == 0
    plain = SamplingParams(max_tokens=5)
    assert taken == ["none", plain, "checkpoint", dataclasses.replace(plain, temperature=0.5, top_k=7)]


def test_the_sampling_of_a_server_is_its_own_business(code, capsys):
    assert code("generate", "x", "--server", "localhost:1", "--sampling", "checkpoint") == 2
    assert "--sampling is the server's own business" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_no_utf8_is_one_clear_line(code, command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert code(command, "--server", "localhost:1") == 2
    assert "standard input is no UTF-8 text" in capsys.readouterr().err


def test_the_system_s_errors_are_one_line_too(code, tmp_path, capsys):
    source = tmp_path / "in"
    source.write_text("{}")
    assert code("batch", str(source), str(tmp_path / "no" / "out")) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("error", "expected"), [(KeyboardInterrupt, 130), (BrokenPipeError(errno.EPIPE, "x"), 1)])
def test_ctrl_c_and_a_closed_pipe_end_without_a_word(code, error, expected, monkeypatch, capsys):
    def ending(*_):
        raise error

    monkeypatch.setattr(generate, "open_source", ending)
    before = sys.stdout, sys.stderr
    assert code("generate", "x") == expected
    sys.stdout, sys.stderr = before
    assert capsys.readouterr() == ("", "")


def test_python_m_is_the_same_command():
    result = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"jaxinfer {jaxinfer.__version__}\n"


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
    own |= {"quantize": "int4"}
    cache = {"page_size": 16, "pages": 5, "memory_fraction": 0.5}
    made = engine_config(**own, **cache, kv_dtype="int8", prefix_cache=False, tensor=2, kernel=["kv_write=xla"])
    cache |= {"dtype": "int8"}
    own["kernels"] = (("kv_write", "xla"),)
    assert made == EngineConfig(**own, prefix_cache=False, cache=CacheConfig(**cache), mesh=MeshConfig(tensor=2))
    assert {*own, "prefix_cache", "cache", "mesh"} == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(cache) == {field.name for field in dataclasses.fields(CacheConfig)}
    assert {field.name for field in dataclasses.fields(MeshConfig)} == {"tensor"}
    assert engine_config() == EngineConfig()
    with pytest.raises(ConfigError, match=r"'kv_write'.*OPERATION=FORM"):
        engine_config(kernel=["kv_write"])
