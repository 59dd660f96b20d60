"""What a replica answers instead of a sample, each with its HTTP status and its code on the wire."""

from __future__ import annotations

from typing import Literal

from shared.sampling.wire import ErrorCode


class Problem(Exception):
    """A request that cannot be served; the message says what happened and what to do. Where it stood in a
    queue (1 = next) and how long it would have waited are said where they are known."""

    code: ErrorCode = "internal"
    status = 500
    retry_after_s: float | None = None

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        *,
        queue_position: int | None = None,
        expected_wait_s: float | None = None,
    ) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        self.queue_position, self.expected_wait_s = queue_position, expected_wait_s


class InvalidRequest(Problem):
    code, status = "invalid_request", 400


class UnknownRevision(Problem):
    """The catalog has no such revision; never answered by the base model."""

    code, status = "unknown_revision", 404


class WrongBase(Problem):
    """The replica serves another base model than the one asked for."""

    code, status = "wrong_base", 409


class LoadFailed(Problem):
    """Refused by admission or by proof, or given up after bounded attempts; the reason is the message.

    The answer stands for `stands_s` seconds; None = as long as the process, since a revision never changes."""

    code, status = "refused", 409

    def __init__(self, message: str, stands_s: float | None = None) -> None:
        super().__init__(message)
        self.stands_s = stands_s


class Loading(Problem):
    """The load was still queued or running when the wait for it ended; it goes on."""

    code, status, retry_after_s = "loading", 503, 2.0


class QueueFull(Problem):
    code, status, retry_after_s = "queue_full", 503, 2.0


class RateLimited(Problem):
    """The caller's own limit, not the replica's: `reason` says which kind."""

    code, status, retry_after_s = "rate_limited", 429, 1.0

    def __init__(self, message: str, reason: Literal["rate", "concurrency"], retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.reason = reason


class EngineDown(Problem):
    """The engine is starting or being restarted; its working set comes back by itself."""

    code, status, retry_after_s = "engine_down", 503, 2.0


class Unavailable(Problem):
    """The catalog or the store was not there, after bounded attempts; says nothing about the revision."""

    code, status, retry_after_s = "unavailable", 503, 2.0
