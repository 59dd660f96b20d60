"""How every object of an OpenAI request is read: frozen, and null is the same as not sent."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["MAX_FIELDS", "MAX_TOKENS", "Fields", "Integer", "Number", "StrictFields"]

MAX_FIELDS = 100
"""Of one object: many more than any has, so that what is wrong with each of them is not listed without end."""

MAX_TOKENS = 1 << 20
"""Of one list of token ids: more than any base model's context."""

Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Fields(BaseModel):
    """What it does not know is kept in `model_extra`, for `refuse_unsupported`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(f"the object has {len(data)} fields; at most {MAX_FIELDS} are read")
        return {key: value for key, value in data.items() if value is not None}


class StrictFields(Fields):
    """What it does not know is refused at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")
