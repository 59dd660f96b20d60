"""The table's invariants, and the page that shows it."""

from __future__ import annotations

import pytest
from mint_schemas import CONTRACTS

from shared.bus import CATALOG_EVENTS, command_durable, table_for
from shared.bus.render import PAGE, page_with_table
from shared.bus.table import DEAD, dead_subject

TABLE = table_for(name for name in ("one", "two"))


def test_every_contract_is_on_its_stream_and_has_a_dead_subject() -> None:
    streams = {stream.name: stream.subjects for stream in TABLE.streams}
    for contract in CONTRACTS:
        assert contract.subject("*") in streams[contract.stream]
        assert dead_subject(contract.subject("*")) in streams[DEAD]
    assert all(subject.count("*") == 1 and subject.endswith(".*") for each in streams.values() for subject in each)


def test_every_command_has_exactly_one_durable_per_base() -> None:
    filters = [subject for durable in TABLE.durables if durable.stream == "COMMANDS" for subject in durable.filters]
    commands = [contract.type for contract in CONTRACTS if contract.stream == "COMMANDS"]
    worked = [type_ for type_ in commands if type_ != "mint.v1.train.requested"]
    assert sorted(filters) == sorted(
        ["mint.v1.train.requested.*", *(f"{type_}.{token}" for type_ in worked for token in ("one", "two"))]
    )


def test_names() -> None:
    assert command_durable("mint.v1.update.requested", "one") == "learner-update-requested-one"
    assert TABLE.durable("learner-update-requested-one").filters == ("mint.v1.update.requested.one",)
    assert len(TABLE.durable(CATALOG_EVENTS).filters) == len([c for c in CONTRACTS if c.stream == "EVENTS"])
    with pytest.raises(ValueError, match="no durable 'learner'"):
        TABLE.durable("learner")
    with pytest.raises(ValueError, match=r"'mint\.v1\.alias\.moved' is no worker's command"):
        command_durable("mint.v1.alias.moved", "one")


def test_a_foreign_subject_has_a_place_on_dead() -> None:
    assert dead_subject("mint.v1.run.failed.one") == "mint.v1.dead.run.failed.one"
    assert dead_subject("somebody.else.one") == "mint.v1.dead.unknown.unknown.one"


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert page_with_table(page) == page
    assert "| `learner-update-requested-<base>` | COMMANDS |" in page


def test_a_page_without_a_place_for_the_table() -> None:
    with pytest.raises(ValueError, match="has no place for the bus table"):
        page_with_table("# Architecture\n")
