"""The reference grammar: `tenant/policy`, `tenant/policy:alias`, `tenant/policy@12`.

The same everywhere: events, the command line, the `model` field of the OpenAI API.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["NAME", "AliasName", "PolicyName", "Reference", "ReferenceText", "parse_reference"]

NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_NAME = re.compile(NAME)
_REFERENCE = re.compile(rf"(?P<tenant>{NAME})/(?P<policy>{NAME})(?::(?P<alias>{NAME})|@(?P<number>[1-9][0-9]{{0,8}}))?")
_ALLOWED = "each part is 1 to 63 of a-z, 0-9, '.', '_' and '-', and starts with a letter or digit"


@dataclass(frozen=True)
class Reference:
    """A parsed reference. Without `number` it means an alias, `live` if none is given."""

    tenant: str
    policy: str
    alias: str | None = None
    number: int | None = None

    @property
    def policy_name(self) -> str:
        return f"{self.tenant}/{self.policy}"

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.policy_name}@{self.number}"
        return f"{self.policy_name}:{self.alias}" if self.alias else self.policy_name


def parse_reference(text: str) -> Reference:
    """Raises ValueError, saying what is allowed, for anything outside the grammar."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        shown = text if len(text) <= 80 else f"{text[:77]}…"
        raise ValueError(
            f"{shown!r} is not a reference; write tenant/policy, tenant/policy:alias or tenant/policy@12, "
            f"where {_ALLOWED}"
        )
    number = match["number"]
    return Reference(match["tenant"], match["policy"], match["alias"], int(number) if number else None)


def _policy_name(text: str) -> str:
    reference = parse_reference(text)
    if reference.alias or reference.number:
        raise ValueError(f"{text!r} names an alias or revision; a policy name is tenant/policy alone")
    return text


def _reference(text: str) -> str:
    parse_reference(text)
    return text


def _alias(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not an alias name: {_ALLOWED}")
    return text


PolicyName = Annotated[str, AfterValidator(_policy_name)]
ReferenceText = Annotated[str, AfterValidator(_reference)]
AliasName = Annotated[str, AfterValidator(_alias)]
