"""What counts as a break, from both sides."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from schemas import compat, generate


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Sft(Strict):
    kind: Literal["sft"]
    steps: Annotated[int, Field(ge=1, le=100)]


class Grpo(Strict):
    kind: Literal["grpo"]
    group: int


class Old(Strict):
    name: Annotated[str, Field(max_length=10, pattern="^[a-z]+$")]
    method: Sft
    colour: Literal["red", "green"] = "red"
    tags: list[str] = []
    limit: int | None = None


class MoreOptional(Old):
    note: str | None = None


class MoreRequired(Old):
    note: str


class MoreColours(Old):
    colour: Literal["red", "green", "blue"] = "red"  # type: ignore[assignment]


class FewerColours(Old):
    colour: Literal["red"] = "red"  # type: ignore[assignment]


class UnionMember(Old):
    method: Annotated[Sft | Grpo, Field(discriminator="kind")]  # type: ignore[assignment]


class OtherMember(Old):
    method: Grpo  # type: ignore[assignment]


class Shorter(Old):
    name: Annotated[str, Field(max_length=5, pattern="^[a-z]+$")]


class OtherPattern(Old):
    name: Annotated[str, Field(max_length=10, pattern="^[a-z0-9]+$")]


class Retyped(Old):
    tags: list[int] = []  # type: ignore[assignment]


class NotNull(Old):
    limit: int = 0


class Wider(Old):
    limit: float | None = None  # type: ignore[assignment]


class Nullable(Old):
    name: str | None  # type: ignore[assignment]


class Removed(Strict):
    name: Annotated[str, Field(max_length=10, pattern="^[a-z]+$")]
    method: Sft
    colour: Literal["red", "green"] = "red"
    tags: list[str] = []


class NestedBound(Old):
    class Fewer(Strict):
        kind: Literal["sft"]
        steps: Annotated[int, Field(ge=2, le=100)]

    method: Fewer  # type: ignore[assignment]


def breaks(new: type[BaseModel], direction: compat.Direction) -> list[str]:
    mode: Any = "validation" if direction == "consumed" else "serialization"
    return compat.breaks(Old.model_json_schema(mode=mode), new.model_json_schema(mode=mode), direction)


@pytest.mark.parametrize("new", [Old, MoreOptional, MoreColours, UnionMember, Wider])
def test_compatible_for_what_we_consume(new: type[BaseModel]) -> None:
    assert breaks(new, "consumed") == []


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (MoreRequired, "body.note: is required now"),
        (Removed, "body.limit: the field was removed"),
        (FewerColours, "body.colour: ['\"green\"'] are no longer accepted"),
        (OtherMember, "body.method: kind=sft was removed, now kind=grpo"),
        (Shorter, "body.name: maxLength is 5 now, was 10"),
        (OtherPattern, "body.name: the pattern is '^[a-z0-9]+$' now, was '^[a-z]+$'"),
        (Retyped, "body.tags[]: string was removed, now integer"),
        (NotNull, "body.limit: null was removed, now integer"),
        (NestedBound, "body.method.steps: minimum is 2 now, was 1"),
    ],
)
def test_breaks_for_what_we_consume(new: type[BaseModel], problem: str) -> None:
    assert breaks(new, "consumed") == [problem]


@pytest.mark.parametrize("new", [Old, MoreOptional, MoreRequired, MoreColours, FewerColours, UnionMember, Shorter])
def test_compatible_for_what_we_publish(new: type[BaseModel]) -> None:
    assert breaks(new, "published") == []


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (Removed, "body.limit: the field was removed"),
        (Retyped, "body.tags[]: string was removed, now integer"),
        (Nullable, "body.name: may now be null"),
        (Wider, "body.limit: integer was removed, now number or null"),
    ],
)
def test_breaks_for_what_we_publish(new: type[BaseModel], problem: str) -> None:
    assert breaks(new, "published") == [problem]


def test_generated_files_are_fresh_and_compatible() -> None:
    assert generate.stale() == []
    assert compat.check() == []


def test_every_contract_has_a_channel_an_operation_and_a_schema() -> None:
    document = generate.asyncapi()
    addresses = {channel["address"] for channel in document["channels"].values()}
    assert addresses == {contract.subject("{baseToken}") for contract in generate.CONTRACTS}
    assert document["operations"]["receiveTrainRequested"]["action"] == "receive"
    assert document["operations"]["sendAliasMoved"]["action"] == "send"
    for message in document["components"]["messages"].values():
        assert (generate.HERE / message["payload"]["$ref"]).resolve() in generate.files()


def test_yaml_of_json_data() -> None:
    data = {"a": {"b-c": ["x: y", {"d": 1, "e": []}], "$ref": True}, "f": {}}
    text = 'a:\n  b-c:\n    - "x: y"\n    - d: 1\n      e: []\n  "$ref": true\nf: {}\n'
    assert generate.to_yaml(data) == text
