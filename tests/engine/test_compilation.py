"""The persistent cache's folder, compiling many at once, and the count of compilations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.compilation import compile_all, compile_counter, default_cache_folder, enable_persistent_cache


def test_each_executable_counts_once():
    step = jax.jit(lambda x: x * 3 + 1)
    x = jnp.arange(7.0)
    before = compile_counter().count
    step(x)
    assert compile_counter().count == before + 1
    step(x)
    assert compile_counter().count == before + 1
    step(x[:5])  # the slice is an executable too
    assert compile_counter().count == before + 3


def test_compile_all_returns_every_executable_and_tells_progress():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    jobs = {n: lambda n=n: jax.jit(lambda x: x * n).lower(shape) for n in range(5)}
    told = []
    done = compile_all(jobs, lambda *news: told.append(news))
    assert told == [("compile", n, 5) for n in range(6)]
    for n in range(5):
        assert done[n](jnp.ones(3)).tolist() == [n] * 3


def test_a_job_that_fails_raises():
    def broken():
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        compile_all({"broken": broken}, None)


def test_the_cache_lies_in_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_folder() == Path("/somewhere/jaxinfer/xla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache/jaxinfer/xla"


def test_a_cache_folder_that_was_set_is_kept_and_an_unset_one_filled():
    set_before = jax.config.jax_compilation_cache_dir
    try:
        for before, after in (("/mine", "/mine"), (None, str(default_cache_folder()))):
            jax.config.update("jax_compilation_cache_dir", before)
            enable_persistent_cache()
            assert jax.config.jax_compilation_cache_dir == after
    finally:
        jax.config.update("jax_compilation_cache_dir", set_before)
