"""The default always works and says why; a form asked for by name runs or fails loudly."""

import inspect

import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import FORMS, Entry, choose


def refuse(*args: int) -> int:
    raise NotImplementedError("head_dim 7 is no multiple of 8")


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = (Entry("elsewhere", refuse, ("tpu",)), Entry("picky", refuse), Entry("plain", double))
    monkeypatch.setitem(FORMS, "kv_write", forms)


@pytest.mark.usefixtures("entries")
def test_the_default_passes_over_a_form_that_cannot_and_says_so() -> None:
    choice = choose("kv_write", platform="cpu")
    assert choice.name == "picky"
    assert "['picky', 'plain']" in choice.why
    assert choice(21) == 42
    assert choice.attempt(21) == ("plain", "picky cannot: head_dim 7 is no multiple of 8", 42)


@pytest.mark.usefixtures("entries")
def test_a_named_form_fails_loudly() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 7"):
        choose("kv_write", "picky", "cpu")(21)
    assert choose("kv_write", "plain", "cpu").attempt(21) == ("plain", "asked for by name", 42)


@pytest.mark.parametrize("operation", FORMS)
def test_every_form_is_found_where_its_name_says(operation: dispatch.Operation) -> None:
    for entry in FORMS[operation]:
        signature = inspect.signature(entry.load(operation))
        shared = [name for name in signature.parameters if name != "interpret"]
        assert shared == list(inspect.signature(FORMS[operation][-1].load(operation)).parameters)


def test_kernels_for_tpu_come_first_there_and_those_for_gpu_only_by_name() -> None:
    for operation in FORMS:
        assert choose(operation, platform="tpu").name == "tpu"
        on_gpu = choose(operation, platform="gpu")
        assert on_gpu.name == "xla"
        assert "has not run on one" in on_gpu.why
        assert choose(operation, "gpu", "gpu").entries[0].load(operation).__module__.endswith(".gpu")
        assert "not run" not in choose(operation, platform="cpu").why


@pytest.mark.usefixtures("entries")
def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*picky.*plain"):
        choose("kv_write", "fast", "cpu")


@pytest.mark.parametrize(
    ("names", "platform", "complaint"),
    [
        ({"attention": "xla"}, None, "no operation 'attention'; expected one of paged_decode_attention"),
        ({"kv_write": "fast"}, "tpu", "kv_write has no form 'fast'; expected one of"),
        (
            {"kv_write": "tpu"},
            "cpu",
            r"kv_write=tpu runs on tpu, and this is cpu; expected one of \['xla', 'reference'\]",
        ),
        ({"quant_matmul": "xla", "kv_write": "gpu"}, "tpu", "kv_write=gpu runs on gpu, and this is tpu"),
    ],
)
def test_names_that_cannot_run_are_found_beforehand(
    names: dict[str, str], platform: str | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        dispatch.check(names, platform)


def test_names_that_can_run_are_let_through() -> None:
    dispatch.check({"kv_write": "tpu", "quant_matmul": "gpu"})
    dispatch.check({"kv_write": "gpu", "quant_matmul": "xla"}, "gpu")


def test_a_fault_inside_a_form_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(number: int) -> int:
        raise TypeError(f"{number} is not an array")

    monkeypatch.setitem(FORMS, "kv_write", (Entry("broken", broken), Entry("plain", double)))
    with pytest.raises(TypeError, match="not an array"):
        choose("kv_write", platform="cpu")(21)


@pytest.mark.parametrize("operation", FORMS)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_default_ends_at_the_reference(operation: dispatch.Operation, platform: str) -> None:
    assert choose(operation, platform=platform).entries[-1].name == "reference"


def test_equal_choices_are_equal_static_arguments() -> None:
    assert choose("kv_write", platform="cpu") == choose("kv_write", platform="cpu")
    assert hash(choose("kv_write", platform="cpu")) == hash(choose("kv_write", platform="cpu"))
    assert choose("kv_write", platform="cpu") != choose("kv_write", "reference", "cpu")
