"""Progress bars on stderr for anything that takes over two seconds.

Knows: how a stage, its count and its total are shown. Does not know what the stages do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Report = Callable[[str, int, int], None]
"""Called as report(stage, done, total); a new stage opens a new bar."""


class _Bars:
    """One bar at a time, replaced when the stage changes."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._bar is None:
            self.close()
            self._stage = stage
            self._bar = tqdm(total=total, desc=stage, dynamic_ncols=True, leave=True)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress_bars(show: bool) -> Iterator[Report | None]:
    """A Report that draws bars on stderr, or None where `show` is false; the last bar is closed on leaving."""
    if not show:
        yield None
        return
    bars = _Bars()
    try:
        yield bars
    finally:
        bars.close()
