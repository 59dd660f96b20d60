"""What the tables of routes share in describing themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = ["EVERY_METHOD", "said"]

EVERY_METHOD = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


def said(answer: type[BaseModel], **texts: str) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of failures: `_404="unknown"` is what an `answer` with status 404 means."""
    return {int(status[1:]): {"model": answer, "description": text} for status, text in texts.items()}
