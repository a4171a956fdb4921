"""Equal prompt prefixes share pages: a full page is named by everything that its keys and values depend on.

The name is a chain, sha256(name of the page before, its token ids), that starts from the salt; so a name stands for the
whole prefix, and prompts under different salts never meet. Knows: names and the pages that carry them. Knows nothing of
owners (`pages.py`) or of time: the caller publishes a page only when the step that wrote it has completed.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from jaxinfer.errors import EngineFault


def root_name(salt: str) -> bytes:
    """The name before the first page: a chain's start under `salt`."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def page_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page of `tokens` that follows the page named `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """The pages that can be hit, by name. Where `enabled` is False nothing is ever published."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._name_of

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest published prefix of `names`."""
        hits = []
        for name in names:
            if name not in self._page_of:
                break
            hits.append(self._page_of[name])
        return hits

    def publish(self, name: bytes, page: int) -> None:
        """Make `page` a hit for `name`. A name that another page carries stays there: both hold the same content."""
        if self.enabled and name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def forget(self, page: int) -> None:
        """End the hits on `page`, because its content goes; no-op where there are none."""
        name = self._name_of.pop(page, None)
        if name is not None:
            del self._page_of[name]

    def revoke(self, names: Sequence[bytes]) -> None:
        """End the hits for `names`, because what they stand for is not to be trusted."""
        for name in names:
            if name in self._page_of:
                self.forget(self._page_of[name])

    def check(self) -> None:
        """Raise EngineFault where names and pages are not one to one."""
        if {page: name for name, page in self._page_of.items()} != self._name_of:
            raise EngineFault(f"{len(self._page_of)} prefix names, {len(self._name_of)} named pages; expected pairs")
