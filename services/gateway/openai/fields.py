"""How every object of an OpenAI request is read: frozen, and null is the same as not sent."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

__all__ = ["Fields", "StrictFields"]


class Fields(BaseModel):
    """What it does not know is kept in `model_extra`, for `refuse_unsupported`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StrictFields(Fields):
    """What it does not know is refused at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")
