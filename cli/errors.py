"""How a command fails: one readable line and an exit code.

Codes: 1 the thing asked for failed, 2 bad input, 3 nothing answers (the stack is down or unreachable).
"""

from __future__ import annotations

FAILED, BAD_INPUT, UNREACHABLE = 1, 2, 3


class CliError(Exception):
    """Shown as `error: <message>`; the process exits with `code`. The message says what to do."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
