"""What is desired does not grow with the catalog; pins are asked for, and few."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from services.catalog import aliases, pins
from services.catalog.residency import RECENT_MOVES, desired
from services.catalog.tables import PolicyRow, RevisionRow, RunRow
from shared.errors import Refused
from tests.catalog_kit import Lab, sft

BASE = "tiny/llama"


def _live_policies(session: Session, base: str, count: int, of_a_tenant: int = 10_000) -> list[str]:
    """`count` policies whose `live` was moved in the order of their numbers, so many of each tenant."""
    model = session.query(RevisionRow).first()
    assert model is not None
    run = session.query(RunRow).first()
    assert run is not None
    names: list[str] = []
    for number in range(count):
        tenant = f"many{number // of_a_tenant or ''}"
        policy = f"{tenant}/p{number:05}"
        names.append(policy)
        session.add(PolicyRow(policy=policy, tenant=tenant, base=base, created_at=0.0, last_number=1))
        session.flush()
        session.add(
            RevisionRow(
                revision=f"{policy}@1", policy=policy, number=1, base=base, run_id=run.run_id, step=1000 + number,
                export_command=f"export-{number}", parent=None, adapter_sha256=model.adapter_sha256,
                adapter_bytes=1, zero_delta=False, manifest=model.manifest, created_at=0.0,
            )
        )  # fmt: skip
        session.flush()
        aliases.move(session, aliases.Move(policy, "live", f"{policy}@1", "test", "test"), "tiny-llama", 0.0)
    session.flush()
    return names


async def test_what_is_desired_is_bounded_whatever_is_live(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    base = lab.run(lab.request(sft())).base

    def check(session: Session) -> None:
        _live_policies(session, base, RECENT_MOVES + 50)
        pins.pin(session, "many/p00000", True)
        wanted = desired(session, base, 0.0)
        lately = [entry.revision for entry in wanted.entries if not entry.keep]
        assert len(lately) == RECENT_MOVES
        assert f"many/p{RECENT_MOVES + 49:05}@1" in lately
        assert "many/p00001@1" not in lately
        assert [entry.revision for entry in wanted.entries if entry.pinned] == ["many/p00000@1"]

    await lab.database.write(check)


async def test_a_base_has_so_many_pins_and_no_more(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    base = lab.run(lab.request(sft())).base

    def check(session: Session) -> None:
        *names, last = _live_policies(session, base, pins.MOST_OF_A_BASE + 1, of_a_tenant=16)
        for name in names:
            assert pins.pin(session, name, True).pinned
        with pytest.raises(Refused, match="256 policies") as refusal:
            pins.pin(session, last, True)
        assert (refusal.value.status, refusal.value.code) == (409, "too_many_pins")
        pins.pin(session, names[0], True)
        pins.pin(session, names[0], False)
        assert pins.pin(session, last, True).pinned

    await lab.database.write(check)


async def test_a_tenant_has_so_many_pins_of_a_base_and_no_more(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    base = lab.run(lab.request(sft())).base

    def check(session: Session) -> None:
        *names, last, others = _live_policies(session, base, 18, of_a_tenant=17)
        for name in names:
            assert pins.pin(session, name, True).pinned
        with pytest.raises(Refused, match=f"many has pinned 16 policies of {base}, as many as it may") as refusal:
            pins.pin(session, last, True)
        assert (refusal.value.status, refusal.value.code) == (409, "too_many_pins")
        assert pins.pin(session, others, True).pinned
        assert pins.pin(session, last, True, most_of_a_tenant=17).pinned

    await lab.database.write(check)


async def test_a_pinned_policy_brings_what_its_four_last_moved_aliases_point_at(lab: Lab) -> None:
    lab.finish(lab.request(sft(steps=6)))
    lab.finish(lab.request(sft("acme/other")))

    def check(session: Session) -> None:
        revisions = session.query(RevisionRow).filter_by(policy="acme/adder").all()
        base, model = revisions[0].base, revisions[0]
        for number in range(2, 8):
            session.add(
                RevisionRow(
                    revision=f"acme/adder@{number}", policy="acme/adder", number=number, base=base, run_id=model.run_id,
                    step=1000 + number, export_command=f"export-{number}", parent=None,
                    adapter_sha256=model.adapter_sha256, adapter_bytes=1, zero_delta=False, manifest=model.manifest,
                    created_at=0.0,
                )
            )  # fmt: skip
            session.flush()
            wanted = aliases.Move("acme/adder", f"a{number}", f"acme/adder@{number}", "test", "test")
            aliases.move(session, wanted, "tiny-llama", 0.0)
        pins.pin(session, "acme/adder", True)
        pins.pin(session, "acme/other", True)
        of_adder = {f"acme/adder@{number}" for number in range(4, 8)}
        assert pins.pinned_revisions(session, base) == of_adder | {"acme/other@1"}

    await lab.database.write(check)


async def test_when_not_every_alias_has_a_place_each_pinned_policy_has_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "MOST_OF_A_BASE", 3)
    lab.finish(lab.request(sft()))
    base = lab.run(lab.request(sft())).base

    def check(session: Session) -> None:
        first, second = _live_policies(session, base, 2)
        pins.pin(session, first, True)
        pins.pin(session, second, True)
        assert pins.pinned_revisions(session, base) == {f"{first}@1", f"{second}@1"}
        monkeypatch.setattr(pins, "MOST_OF_A_BASE", 1)
        assert pins.pinned_revisions(session, base) == {f"{second}@1"}

    await lab.database.write(check)


async def test_the_last_moves_are_read_without_the_audit_trail(lab: Lab) -> None:
    lab.finish(lab.request(sft()))
    base = lab.run(lab.request(sft())).base
    asked: list[tuple[str, Any]] = []

    def check(session: Session) -> None:
        _live_policies(session, base, 3)
        connection = session.connection()

        def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
            asked.append((statement, parameters))

        event.listen(connection, "before_cursor_execute", note)
        desired(session, base, 0.0)
        event.remove(connection, "before_cursor_execute", note)
        about_moves = [(text, values) for text, values in asked if "aliases" in text and "policies" not in text]
        assert len(about_moves) == 1
        assert not any("alias_moves" in text for text, _ in asked)
        text, values = about_moves[0]
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)]
        assert len(plan) == 1
        assert "ix_aliases_moved" in plan[0]

    await lab.database.write(check)
