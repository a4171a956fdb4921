"""The page pool: free xor owned, and the order in which free pages are used again."""

import pytest

from jaxinfer.errors import EngineFault
from jaxinfer.scheduler.pages import PagePool


def test_a_page_is_free_xor_owned():
    pool = PagePool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3
    assert pool.free == 1
    assert [pool.is_free(page) for page in taken] == [False] * 3
    pool.check(dict.fromkeys(taken, 1))


def test_blank_pages_are_used_before_kept_ones_and_kept_ones_oldest_first():
    pool = PagePool(4)
    a, b, c, d = pool.take(4)
    pool.release(a, keep=True)
    pool.release(b, keep=False)
    pool.release(c, keep=True)
    pool.release(d, keep=False)
    order = pool.take(4)
    assert set(order[:2]) == {b, d}
    assert order[2:] == [a, c]


def test_reviving_a_page_makes_it_the_last_to_be_evicted():
    pool = PagePool(2)
    a, b = pool.take(2)
    pool.release(a, keep=True)
    pool.release(b, keep=True)
    pool.share(a)
    pool.release(a, keep=True)
    assert pool.take(2) == [b, a]


def test_a_shared_page_is_free_after_its_last_owner():
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.share(page)
    pool.release(page, keep=True)
    pool.check({page: 1})
    pool.release(page, keep=True)
    pool.check({})


def test_taking_more_than_is_free_takes_nothing():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(EngineFault, match="asked for 2 pages with 1 free"):
        pool.take(2)
    assert pool.free == 1


def test_a_page_released_twice_is_a_fault():
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.release(page, keep=False)
    with pytest.raises(EngineFault, match="released while nobody owned it"):
        pool.release(page, keep=False)


@pytest.mark.parametrize("held", [{}, {0: 2}, {0: 1, 1: 1}])
def test_check_finds_a_leak_a_missing_owner_and_a_stranger(held):
    pool = PagePool(2)
    assert pool.take(1) == [0]
    with pytest.raises(EngineFault, match="owners"):
        pool.check(held)
