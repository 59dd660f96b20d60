"""Two kinds of failure, and only two: what a retry may mend, and what it cannot."""

from __future__ import annotations


class MintError(Exception):
    """Root of the project's own errors. The message says what happened, with what, and what to do."""


class Retryable(MintError):
    """May go away by itself; redelivered after `delay_s` (None = growing with each delivery)."""

    def __init__(self, message: str, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class Outage(Retryable):
    """A part of the system does not answer. It says nothing about the work that met it, so a command is
    given back without a take counted against it."""


class Busy(Retryable):
    """Nothing is broken; a bound is reached. `code` is stable and `status` 503 (no room now) or 429 (the caller's own
    limit); the place in the queue and the expected wait are said where they are known."""

    def __init__(
        self,
        message: str,
        code: str,
        status: int = 503,
        delay_s: float | None = None,
        queue_position: int | None = None,
        expected_wait_s: float | None = None,
    ) -> None:
        super().__init__(message, delay_s)
        self.code, self.status = code, status
        self.queue_position, self.expected_wait_s = queue_position, expected_wait_s


class Fatal(MintError):
    """Will not go away: dead-lettered with this message as the reason, and the run fails with it."""


class Refused(MintError):
    """Bad input at the edge. `code` is stable, `near` lists what was perhaps meant."""

    def __init__(
        self, message: str, code: str = "invalid_request", near: list[str] | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.code, self.near, self.status = code, near or [], status
