"""What the contracts share: strict and lenient bases, file references, numbers without NaN."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

__all__ = ["WHOLE", "Body", "FileRef", "Finite", "JsonScalar", "Positive", "Sha256", "Strict"]


def _is_number(value: Any) -> Any:
    if isinstance(value, str | bytes | bool):
        raise PydanticKnownError("int_type")
    return value


class _Whole:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = cast(core_schema.IntSchema, handler(source))
        schema["strict"] = False
        return core_schema.no_info_before_validator_function(_is_number, schema)


WHOLE = _Whole()
"""Last in an annotated int, any integer of JSON, for which 7.0 is one, and "7" and true are none."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
JsonScalar = Annotated[str, Field(max_length=1000)] | bool | int | Finite


class Strict(BaseModel):
    """What others publish to us: an unknown field is refused, so that a typing error never passes, and so is a value
    of another JSON type (a number as text, a truth value for a number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Body(BaseModel):
    """What we publish: readers ignore fields that they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FileRef(Strict):
    """A claim check: where the bytes are, how many, and what they hash to."""

    key: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@:+-]*$")]
    sha256: Sha256
    size: Annotated[int, Field(ge=0), WHOLE]
