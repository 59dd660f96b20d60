"""The keyring: how long an answer of the catalog counts, and what holds while it gives none."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.keyring import Keyring
from shared.catalog.keys import KeyView, key_digest, new_key
from shared.errors import Refused, Retryable
from tests.unit.gateway.key_book import FakeBook


class Ring:
    """A keyring over a book, and a clock that a test turns."""

    def __init__(self, book: FakeBook, remember: int = 100, timeout_s: float = 2.0) -> None:
        self.now = 1000.0
        self.ring = Keyring(book, remember=remember, timeout_s=timeout_s, now=lambda: self.now)

    async def tenant(self, key: str) -> str | None:
        view, _ = await self.ring.find(key_digest(key))
        return None if view is None or view.revoked_at is not None else view.tenant


async def test_a_key_is_asked_about_once_in_ten_seconds() -> None:
    book = FakeBook()
    ring, key = Ring(book), book.made("acme")
    for _ in range(20):
        assert await ring.tenant(key) == "acme"
        ring.now += 0.49
    assert len(book.asked) == 1
    ring.now = 1010.0
    assert await ring.tenant(key) == "acme"
    assert len(book.asked) == 2


async def test_a_revoked_key_ends_within_ten_seconds() -> None:
    book = FakeBook()
    ring, key = Ring(book), book.made("acme")
    assert await ring.tenant(key) == "acme"
    book.revoked(key)
    ring.now = 1010.0
    assert await ring.tenant(key) is None


async def test_an_answer_counts_from_before_it_was_asked_for() -> None:
    book = FakeBook()
    ring, key = Ring(book), book.made("acme")
    book.held = asyncio.Event()
    slow = asyncio.create_task(ring.tenant(key))
    await book.looked.wait()
    book.revoked(key)
    ring.now = 1009.0
    book.held.set()
    assert await slow == "acme"
    ring.now = 1010.0
    assert await ring.tenant(key) is None


async def test_a_new_key_works_within_two_seconds_of_having_been_tried_too_early() -> None:
    book = FakeBook()
    ring, key = Ring(book), new_key()
    assert await ring.tenant(key) is None
    view = book.views[key_digest(book.made("acme"))]
    book.views[key_digest(key)] = view
    assert await ring.tenant(key) is None
    assert len(book.asked) == 1
    ring.now += 2.0
    assert await ring.tenant(key) == "acme"


async def test_while_the_catalog_is_away_its_last_answer_holds_and_is_marked() -> None:
    book = FakeBook()
    ring, key, ended = Ring(book), book.made("acme"), book.made("acme")
    book.revoked(ended)
    assert await ring.tenant(key) == "acme"
    assert await ring.tenant(ended) is None
    book.down = True
    ring.now += 299.0
    view, stale = await ring.ring.find(key_digest(key))
    assert (view is not None and view.tenant, stale) == ("acme", True)
    assert await ring.tenant(ended) is None
    ring.now += 1.0
    with pytest.raises(Retryable, match="cannot be checked"):
        await ring.tenant(key)
    book.down = False
    view, stale = await ring.ring.find(key_digest(key))
    assert (view is not None and view.tenant, stale) == ("acme", False)


async def test_while_the_catalog_is_away_nobody_unknown_is_let_in_or_refused_for_good() -> None:
    book = FakeBook()
    ring, tried, new = Ring(book), new_key(), new_key()
    assert await ring.tenant(tried) is None
    book.down = True
    ring.now += 2.0
    for key in (tried, new):
        with pytest.raises(Retryable):
            await ring.tenant(key)


async def test_a_catalog_that_is_away_is_not_asked_with_every_request() -> None:
    book = FakeBook()
    ring, key = Ring(book), book.made("acme")
    await ring.tenant(key)
    book.down = True
    ring.now += 10.0
    for _ in range(10):
        assert await ring.tenant(key) == "acme"
    assert len(book.asked) == 2
    ring.now += 1.0
    assert await ring.tenant(key) == "acme"
    assert len(book.asked) == 3


async def test_a_catalog_that_hangs_is_away() -> None:
    book = FakeBook()
    ring, key = Ring(book, timeout_s=0.01), book.made("acme")
    book.held = asyncio.Event()
    with pytest.raises(Retryable, match="cannot be checked"):
        await ring.tenant(key)


async def test_requests_at_once_share_one_question_and_none_ends_it_for_the_others() -> None:
    book = FakeBook()
    ring, key = Ring(book), book.made("acme")
    book.held = asyncio.Event()
    waiting = [asyncio.create_task(ring.tenant(key)) for _ in range(5)]
    await book.looked.wait()
    waiting[0].cancel()
    await asyncio.sleep(0)
    book.held.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == ["acme"] * 4
    assert len(book.asked) == 1


async def test_strangers_who_try_keys_push_out_none_that_works() -> None:
    book = FakeBook()
    ring, key = Ring(book, remember=3), book.made("acme")
    await ring.tenant(key)
    for _ in range(50):
        assert await ring.tenant(new_key()) is None
    asked = len(book.asked)
    assert await ring.tenant(key) == "acme"
    assert len(book.asked) == asked


async def test_what_is_remembered_is_bounded() -> None:
    book = FakeBook()
    ring = Ring(book, remember=3)
    keys = [book.made("acme") for _ in range(5)]
    for key in keys:
        await ring.tenant(key)
    for key in (keys[-1], keys[0]):
        await ring.tenant(key)
    assert book.asked == [key_digest(key) for key in [*keys, keys[0]]]


async def test_a_refusal_that_says_nothing_of_the_key_is_passed_on() -> None:
    class Strange(FakeBook):
        async def verify(self, sha256: str) -> KeyView:
            raise Refused("sha256: a string is expected", status=400)

    with pytest.raises(Refused, match="a string is expected"):
        await Ring(Strange()).tenant(new_key())
