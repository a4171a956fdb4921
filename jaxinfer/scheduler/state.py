"""Who waits, who runs, and on which slots and pages: the scheduler's state with the verbs that keep it whole.

Knows: the two queues, free slots, the page pool and the prefix cache. Decides nothing (`policy.py`) and calls no
engine. Slots and pages are given on as soon as their owner leaves, even while a step that writes them is in flight: the
device runs steps in dispatch order, so a later plan's writes come after.
"""

from bisect import insort
from collections import Counter

from jaxinfer.errors import EngineFault
from jaxinfer.plan import Limits
from jaxinfer.scheduler.pages import PagePool
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.sequence import Sequence


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


class State:
    """Both queues stand in rank order: higher priority first, then arrival, then choice.

    `deterministic` keeps every key and value from depending on the neighbours: a sequence is admitted with a claim on
    all the pages it can ever need, so that nothing is preempted and computed again by another executable; only pages of
    prompts are published, which prefill wrote; and chunks start at multiples of `Limits.chunk`, hits or not, for how
    keys are summed depends on where the chunk starts.
    """

    def __init__(self, limits: Limits, *, prefix_cache: bool, deterministic: bool = False) -> None:
        self.limits = limits
        self.deterministic = deterministic
        self.pool = PagePool(limits.pages)
        self.cache = PrefixCache(enabled=prefix_cache)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_slots = list(range(limits.slots - 1, -1, -1))
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0

    def enqueue(self, sequence: Sequence) -> None:
        """Let it wait at its rank."""
        insort(self.waiting, sequence, key=_rank)

    # ---- admission ---------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """Published pages of its known tokens, all but the last: that one must run to give logits."""
        if not len(self.cache):
            return []
        hits = self.cache.match(sequence.names((len(sequence.tokens) - 1) // self.limits.page_size))
        return hits[: len(hits) - len(hits) % (self.chunk_grain // self.limits.page_size)]

    @property
    def chunk_grain(self) -> int:
        """Every chunk starts at a multiple of so many tokens."""
        return self.limits.chunk if self.deterministic else self.limits.page_size

    @property
    def room(self) -> int:
        """Pages that admission may use: the free ones, less what the running sequences may claim; 0 without a slot."""
        claims = sum(self.claim(sequence, len(sequence.pages)) for sequence in self.running)
        return max(0, self.pool.free - claims) if self.free_slots else 0

    def can_admit(self, sequence: Sequence, room: int) -> bool:
        """True where its known tokens and its own claim fit into `room` pages; hits that somebody owns cost none."""
        hits = self.match(sequence)
        pages = sequence.pages_for(len(sequence.tokens))
        taken = pages - len(hits) + sum(self.pool.is_free(page) for page in hits)
        return taken + self.claim(sequence, pages) <= room

    def claim(self, sequence: Sequence, held: int) -> int:
        """Free pages that admission leaves for the growth of a running sequence that holds `held`.

        One of them keeps a prompt from being let in only to be preempted by its neighbours' next page; all of them keep
        anything from ever being preempted.
        """
        growth = sequence.final_pages - held
        return growth if self.deterministic else min(growth, 1)

    def admit(self, sequence: Sequence, now: float) -> None:
        """Move it from waiting to running: a slot, its hits, and pages for every known token."""
        self.waiting.remove(sequence)
        hits = self.match(sequence)
        for page in hits:
            self.pool.share(page)
        sequence.slot = self.free_slots.pop()
        sequence.pages = hits
        sequence.planned = len(hits) * self.limits.page_size
        sequence.published = len(hits)
        sequence.prefill_end = len(sequence.tokens)
        sequence.admissions += 1
        self.grow(sequence, sequence.pages_for(len(sequence.tokens)) - len(hits))
        insort(self.running, sequence, key=_rank)
        if sequence.started is None:
            sequence.started = now
            sequence.cached_tokens = sequence.planned
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.planned

    def grow(self, sequence: Sequence, count: int) -> None:
        """Give it `count` more pages; prefixes that lay on them are evicted."""
        for page in self.pool.take(count):
            self.cache.forget(page)
            sequence.pages.append(page)

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting without slot and pages; its prompt and output are the prompt of its next prefill.

        A token in flight still comes: until then it is not `ready`.
        """
        self.preemptions += 1
        self._vacate(sequence)
        self.enqueue(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Take an ended sequence out of whichever queue it stands in."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            raise EngineFault(f"{sequence.request.id} gives its slot back but has none; expected a running sequence")
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        # From the end, so that of one prefix the last page is evicted first: a page without its parents is no hit.
        for page in reversed(sequence.pages):
            self.pool.release(page, keep=page in self.cache)
        sequence.slot, sequence.pages, sequence.planned, sequence.prefill_end = None, [], 0, 0

    # ---- what a completed step wrote ---------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, written: int) -> None:
        """Make its full pages hits, now that its first `written` positions are known to be on the device."""
        prompt = len(sequence.request.prompt)
        full = (min(written, prompt) if self.deterministic else written) // self.limits.page_size
        if full > sequence.published and self.cache.enabled:
            names = sequence.names(full)
            for index in range(sequence.published, full):
                self.cache.publish(names[index], sequence.pages[index])
            sequence.published = full
        if written >= prompt:
            sequence.siblings.prompt_published = True

    def distrust(self, sequence: Sequence) -> None:
        """End the hits on its tokens: something not finite was computed from them.

        By name and not by its pages, which a preemption may have taken from it.
        """
        self.cache.revoke(sequence.names(len(sequence.tokens) // self.limits.page_size))

    # ---- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineFault where pages, slots or queues do not add up."""
        self.pool.check(Counter(page for sequence in self.running for page in sequence.pages))
        self.cache.check()
        slots = sorted([*self.free_slots, *(sequence.slot for sequence in self.running if sequence.slot is not None)])
        if slots != list(range(self.limits.slots)):
            raise EngineFault(f"slots free or taken are {slots}; expected each of {self.limits.slots} once")
        for sequence in self.running:
            if len(sequence.pages) < sequence.pages_for(sequence.planned) or sequence.finish is not None:
                raise EngineFault(
                    f"{sequence.request.id} has {len(sequence.pages)} pages for {sequence.planned} tokens"
                )
        for sequence in self.waiting:
            if sequence.pages or sequence.slot is not None or sequence.finish is not None:
                raise EngineFault(f"{sequence.request.id} waits with {len(sequence.pages)} pages; expected none")
