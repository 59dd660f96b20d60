"""What is started, and with which settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.stack.ports import USUAL
from cli.stack.services import SERVICES, service_names, service_parts
from cli.stack.stores import nats_part, s3_part


@pytest.fixture
def data(tmp_path: Path) -> Path:
    bases = [
        {"name": "Org/One", "token": "one", "directory": "/one"},
        {"name": "two", "token": "two", "directory": "/2"},
    ]
    (tmp_path / "bases.json").write_text(json.dumps({"bases": bases}))
    return tmp_path


def _ports(data: Path) -> dict[str, int]:
    return USUAL | {name: 9000 + number for number, name in enumerate(service_names(data))}


def test_seven_services_and_a_pair_for_each_further_base(data: Path) -> None:
    parts = {part.name: part for part in service_parts(data, _ports(data), "vllm")}
    assert len(SERVICES) == 7
    assert set(parts) == {*SERVICES, "learner-two", "serving-two"}
    assert parts["serving"].env["MINT_SERVING_BASE"] == "Org/One"
    assert parts["serving-two"].env["MINT_SERVING_BASE"] == "two"
    assert parts["learner-two"].command[-1] == "services.learner"
    assert parts["learner"].env["OMP_NUM_THREADS"] == "1"
    assert len({part.env["MINT_PORT"] for part in parts.values()}) == len(parts)


def test_nats_syncs_every_message_to_disk(data: Path) -> None:
    text = next(iter(nats_part(data, USUAL).files.values()))
    assert "sync_interval: always" in text
    assert str(data / "nats") in text


def test_the_object_store_comes_back_fast_and_tells_nobody(data: Path) -> None:
    command = s3_part(data, USUAL).command
    for flag in ("-master.electionTimeout=1s", "-master.raftBootstrap", "-volume.preStopSeconds=1"):
        assert flag in command
    assert "-master.telemetry=false" in command
    assert "-ip.bind=127.0.0.1" in command


def test_other_settings_have_another_digest(data: Path) -> None:
    before = service_parts(data, _ports(data), "vllm")[0]
    assert before.settings == service_parts(data, _ports(data), "vllm")[0].settings
    assert replace(before, env={**before.env, "MINT_PORT": "1"}).settings != before.settings
    (data / "bases.json").write_text(json.dumps({"bases": [{"name": "x", "token": "x", "directory": "/x"}]}))
    assert service_parts(data, _ports(data), "vllm")[0].settings != before.settings
