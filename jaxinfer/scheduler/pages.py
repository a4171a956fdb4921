"""The page pool's bookkeeping on the host: which pages are free, in which order they are reused, who counts on them.

Knows: page ids, reference counts, the eviction order. Knows nothing of tokens, prefixes or sequences, and never sees
the arrays: the engine holds those. Every page is free xor owned at any time; a free page may still hold a prefix that
the prefix cache can revive, which is why the free list is ordered.
"""

from collections import OrderedDict
from collections.abc import Mapping

from jaxinfer.errors import EngineFault


class PagePool:
    """`pages` pages of the pool, all free at first.

    The front of the free list is reused first: pages whose content nobody can ask for again stand there, then those
    worth keeping, the longest unused first.
    """

    def __init__(self, pages: int) -> None:
        self._owners = [0] * pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        """Pages that nobody owns, those with a revivable prefix included."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """True where no sequence owns `page`."""
        return self._owners[page] == 0

    def take(self, count: int) -> list[int]:
        """Own `count` free pages alone; their old content is lost, so the caller tells the prefix cache to forget it.

        Raises EngineFault where fewer are free: ask `free` first.
        """
        if count > len(self._free):
            raise EngineFault(f"asked for {count} pages with {len(self._free)} free; expected the caller to look first")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Own `page` along with whoever does, or revive it from the free list; its content stays."""
        if self._owners[page] == 0:
            del self._free[page]
        self._owners[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """Give one ownership of `page` back; the last one frees it. `keep` puts it at the late end of the free list."""
        if self._owners[page] <= 0:
            raise EngineFault(f"page {page} was released while nobody owned it; expected one release per owner")
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free[page] = None
            self._free.move_to_end(page, last=keep)

    def check(self, held: Mapping[int, int]) -> None:
        """Compare with `held`: how many sequences hold each page. Raises EngineFault where they disagree."""
        for page, owners in enumerate(self._owners):
            expected = held.get(page, 0)
            if owners != expected:
                raise EngineFault(
                    f"page {page} counts {owners} owners; expected {expected}, the sequences that hold it"
                )
            if (owners == 0) != (page in self._free):
                raise EngineFault(f"page {page} has {owners} owners and is free: {page in self._free}; expected one")
