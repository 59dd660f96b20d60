"""A training request from a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from cli.errors import BAD_INPUT, CliError
from cli.spec import read_object, read_spec

REQUEST = {
    "policy": "acme/adder",
    "base": "b",
    "method": {"kind": "sft", "steps": 2, "data": {"kind": "task", "task": {"kind": "arithmetic"}}},
}


def test_json_toml_and_standard_input_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps(REQUEST))
    (tmp_path / "a.toml").write_text(
        'policy = "acme/adder"\nbase = "b"\n[method]\nkind = "sft"\nsteps = 2\n'
        '[method.data]\nkind = "task"\n[method.data.task]\nkind = "arithmetic"\n'
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(REQUEST)))
    assert read_spec(str(tmp_path / "a.json")) == read_spec(str(tmp_path / "a.toml")) == read_spec("-") == REQUEST


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "acme/../x"}, "policy: 'acme/../x' is not a reference"),
        ({"policy": "acme/" + "a" * 300}, "policy: .*is not a reference"),
        ({"policy": "Acme/Adder"}, "policy: 'Acme/Adder' is not a reference"),
        ({"method": {**REQUEST["method"], "steps": 0}}, "steps"),  # type: ignore[dict-item]
        ({"method": {**REQUEST["method"], "optimizer": {"learning_rate": float("nan")}}}, "learning_rate"),  # type: ignore[dict-item]
        ({"colour": "red"}, "colour: there is no such field"),
    ],
)
def test_what_the_contract_refuses_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**REQUEST, **change}))
    with pytest.raises(CliError, match=said) as caught:
        read_spec(str(path))
    assert caught.value.code == BAD_INPUT
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "neither JSON"),
        ('{"a":' * 5000, "neither JSON"),
        ("[]", "list; a training request is an object"),
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CliError, match=said):
        read_spec(str(path))
    with pytest.raises(CliError, match="cannot read"):
        read_spec(str(tmp_path / "absent.json"))


@pytest.mark.parametrize("value", ["2026-01-02", "nan", "inf"])
def test_what_toml_has_and_json_has_not_is_refused_in_words(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"kind = {value}\n")
    with pytest.raises(CliError, match=r"no word for") as caught:
        read_object(str(path), "a task")
    assert caught.value.code == BAD_INPUT
