"""What the contracts share: strict and lenient bases, file references, numbers without NaN."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Body", "FileRef", "Finite", "JsonScalar", "Positive", "Sha256", "Strict"]

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
JsonScalar = Annotated[str, Field(max_length=1000)] | bool | int | Finite


class Strict(BaseModel):
    """What others publish to us: an unknown field is refused, so that a typing error never passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Body(BaseModel):
    """What we publish: readers ignore fields that they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FileRef(Strict):
    """A claim check: where the bytes are, how many, and what they hash to."""

    key: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@:+-]*$")]
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
