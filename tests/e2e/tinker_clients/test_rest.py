"""The REST calls of both public clients, by a tenant of its own, and what another tenant's key sees of its work."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tinker_clients.clients import Desk
from tests.e2e.tinker_clients.numbers import TOLERANCE, apart, by_transformers
from tests.tiny import TINY_NAME


@pytest.fixture(scope="module")
def tenant(desk: Desk) -> str:
    return f"owner-{desk.client.name}"


@pytest.fixture(scope="module")
def seen(desk: Desk, tenant: str) -> Any:
    return desk.run("rest", key=desk.key(tenant), CLIENT_OTHER_KEY=desk.key(f"other-{desk.client.name}"))


def is_absent(refused: Any) -> bool:
    """A 404, or a future that fails in its words."""
    return refused is not None and (refused["status"] == 404 or refused["category"] == "user")


def test_the_base_models_are_listed(seen: Any) -> None:
    assert seen["models"] == [[TINY_NAME, 1024]]


def test_lists_come_in_pages_that_make_up_the_whole(seen: Any) -> None:
    pages = seen["pages"]
    assert [len(page) for page in pages["runs"]] == [2, 1]
    assert pages["totals"] == [3, 3]
    runs = [run for page in pages["runs"] for run in page]
    assert len(set(runs)) == 3
    assert seen["model_id"] in runs
    assert pages["checkpoints"] == [[seen["sampler"]], [seen["state"]], []]
    assert pages["checkpoint_totals"] == [2, 2, 2]


def test_a_run_and_its_checkpoints_are_described(seen: Any, tenant: str) -> None:
    described, state, sampler = seen["described"], seen["state"], seen["sampler"]
    assert described["run"] == {
        "id": seen["model_id"],
        "base": TINY_NAME,
        "owner": tenant,
        "rank": 8,
        "metadata": {"purpose": "rest"},
        "last": state,
        "last_sampler": sampler,
    }
    assert described["same"] == seen["model_id"]
    assert [[it["id"], it["type"], it["path"], it["public"], it["expires"]] for it in described["checkpoints"]] == [
        ["weights/kept", "training", state, False, False],
        ["sampler_weights/sampled", "sampler", sampler, False, False],
    ]
    assert all(it["size"] > 1000 for it in described["checkpoints"])


def test_the_output_layer_is_never_said_to_be_trained(seen: Any) -> None:
    expected = [TINY_NAME, True, 8, True, True, False]
    assert seen["described"]["info"] == {seen["state"]: expected, seen["sampler"]: expected}


def test_sessions_hold_their_runs_and_samplers(seen: Any) -> None:
    sessions = seen["sessions"]
    assert sessions["session"] in sessions["listed"]
    assert len(sessions["runs"]) == 3
    assert seen["model_id"] in sessions["runs"]
    assert sessions["samplers"] == [0, 1]
    assert sessions["sampler"][0].startswith(sessions["session"])
    assert sessions["sampler"][1] == sessions["base"] == TINY_NAME


def test_another_tenant_sees_a_checkpoint_only_while_it_is_published(seen: Any) -> None:
    published = seen["published"]
    for when in ("before", "after"):
        assert published[when]["seen"]["status"] == 404
        assert is_absent(published[when]["sampled"])
    assert published["during"]["seen"] is None
    assert published["during"]["sampled"] is None
    assert apart(published["during"]["trained"], seen["trained"]) <= TOLERANCE
    assert published["flags"] == [True, True]


def test_publishing_gives_no_more_than_reading(seen: Any) -> None:
    published = seen["published"]
    assert published["taken"]["status"] == 404
    assert published["run"]["status"] == 404
    assert seen["model_id"] not in published["runs"]


def test_expiries_are_set_and_taken_away_and_pass(seen: Any) -> None:
    lifetimes = seen["lifetimes"]
    assert lifetimes["expires"] == [False, True, False]
    assert lifetimes["brief"]["status"] == 404


def test_what_is_deleted_is_gone(seen: Any) -> None:
    lifetimes = seen["lifetimes"]
    assert lifetimes["deleted"]["status"] == 404
    assert lifetimes["twice"]["status"] == 404
    assert lifetimes["left"] == ["weights/kept", "sampler_weights/sampled"]
    assert seen["unknown_run"]["status"] == 404


def test_archives_are_peft_directories_of_the_trained_model(seen: Any, base: Path, tmp_path: Path) -> None:
    for number, archive in enumerate(seen["archives"].values()):
        assert archive["type"] == "application/gzip"
        place = tmp_path / str(number)
        with tarfile.open(archive["place"]) as tar:
            tar.extractall(place, filter="data")
        (adapter,) = {found.parent for found in place.rglob("adapter_config.json")}
        assert apart(by_transformers(base, seen["rows"], adapter), seen["trained"]) <= TOLERANCE


def test_copies_are_runs_of_their_own_with_the_same_weights(seen: Any, desk: Desk) -> None:
    if desk.client.sdk == "mint":
        assert seen["copied"] is None  # its client has no copies
        return
    copied = seen["copied"]
    assert [path.split("/")[3:] for path in copied["paths"]] == [
        ["weights", "kept"],
        ["sampler_weights", "sampled"],
        ["weights", "kept"],
    ]
    assert len({path.split("/")[2] for path in (seen["state"], *copied["paths"])}) == 4
    assert copied["ranks"] == [8, 8, 8]
    assert all(apart(found, seen["trained"]) <= TOLERANCE for found in copied["forward"])
