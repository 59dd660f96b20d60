"""The bound on open files goes up to what the system allows, and never down."""

from __future__ import annotations

import resource

import pytest

from shared import open_files

UNBOUNDED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 1 << 16),
        (1024, UNBOUNDED, 1 << 16),
        (1 << 18, 1 << 20, 1 << 18),
        (4096, 4096, 4096),
        (UNBOUNDED, UNBOUNDED, UNBOUNDED),
    ],
)
def test_it_is_raised_as_far_as_is_allowed(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, wanted: limits.append(wanted))
    assert open_files.allow_more() == then
    assert limits[-1] == (then, hard)


def test_a_system_that_refuses_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, wanted: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert open_files.allow_more() == 256
