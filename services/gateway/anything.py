"""`{name:anything}` in a route's path: as `{name:path}`, and line ends too, which a percent-encoded path may hold.

A path that no route takes would be answered by the framework, in its own shape.
"""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor

__all__ = ["register_anything"]


class _Anything(Convertor[str]):
    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def register_anything() -> None:
    register_url_convertor("anything", _Anything())
