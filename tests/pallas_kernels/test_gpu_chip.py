"""A kernel is refused on a GPU that lacks its instructions, and nowhere else."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.gpu_chip import require_hopper


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])


@pytest.mark.parametrize(("capability", "or_newer"), [("8.0", False), ("8.9", True), ("10.0", False)])
def test_refuses_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: str, or_newer: bool) -> None:
    on_gpu(monkeypatch, capability)
    with pytest.raises(NotImplementedError, match=capability.replace(".", r"\.")):
        require_hopper(or_newer=or_newer)


@pytest.mark.parametrize(("capability", "or_newer"), [("9.0", False), ("9.0", True), ("10.0", True), ("12.1", True)])
def test_takes_a_gpu_that_can(monkeypatch: pytest.MonkeyPatch, capability: str, or_newer: bool) -> None:
    on_gpu(monkeypatch, capability)
    require_hopper(or_newer=or_newer)


def test_asks_nothing_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("asked"))
    require_hopper()
