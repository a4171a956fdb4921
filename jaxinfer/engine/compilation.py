"""Compiling ahead of time: the persistent cache, many executables at once, and a count that proves the promise.

Knows: JAX's compile machinery. Knows nothing of what is compiled.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import jax

Progress = Callable[[str, int, int], None]
"""Called as progress(label, done, total)."""

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
THREADS = 4


class CompileCounter:
    """Counts the executables that JAX has made in this process, read from the persistent cache or compiled."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILE_EVENT:
            self.count += 1


@cache
def compile_counter() -> CompileCounter:
    """The one counter of this process: JAX listeners cannot be taken off again."""
    return CompileCounter()


def default_cache_folder() -> Path:
    """Where executables are kept: `$XDG_CACHE_HOME/jaxinfer/xla`, by default under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jaxinfer" / "xla"


def enable_persistent_cache() -> None:
    """Keep executables on disk between processes; a folder set by JAX_COMPILATION_CACHE_DIR or the program is kept."""
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(default_cache_folder()))


def compile_all(jobs: Mapping[Any, Callable[[], jax.stages.Lowered]], progress: Progress | None) -> dict[Any, Any]:
    """Lower and compile every job; executables by the jobs' keys.

    On threads: lowering is Python and takes its turn, but XLA compiles without the interpreter lock.
    """
    done: dict[Any, Any] = {}
    if progress:
        progress("compile", 0, len(jobs))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(lambda lower: lower().compile(), lower): key for key, lower in jobs.items()}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            if progress:
                progress("compile", len(done), len(jobs))
    return done
