"""What is desired does not grow with the catalog; pins are asked for, and few."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from services.catalog import pins
from services.catalog.residency import RECENT_MOVES, desired
from services.catalog.tables import AliasMoveRow, AliasRow, PolicyRow, RevisionRow, RunRow
from shared.errors import Refused
from tests.catalog_kit import Lab, sft

BASE = "tiny/llama"


def _live_policies(session: Session, base: str, count: int) -> None:
    """`count` policies whose `live` was moved in the order of their numbers."""
    model = session.query(RevisionRow).first()
    assert model is not None
    run = session.query(RunRow).first()
    assert run is not None
    for number in range(count):
        policy = f"many/p{number:05}"
        session.add(PolicyRow(policy=policy, tenant="many", base=base, created_at=0.0, last_number=1))
        session.flush()
        session.add(
            RevisionRow(
                revision=f"{policy}@1", policy=policy, number=1, base=base, run_id=run.run_id, step=1000 + number,
                export_command=f"export-{number}", parent=None, adapter_sha256=model.adapter_sha256,
                adapter_bytes=1, zero_delta=False, manifest=model.manifest, created_at=0.0,
            )
        )  # fmt: skip
        session.flush()
        session.add(AliasRow(policy=policy, alias="live", revision=f"{policy}@1", previous=None, version=1))
        session.add(
            AliasMoveRow(
                policy=policy, alias="live", version=1, revision=f"{policy}@1", previous=None, reason="test",
                actor="test", run_id=None, at=0.0,
            )
        )  # fmt: skip
    session.flush()


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
        _live_policies(session, base, pins.MOST_OF_A_BASE + 1)
        for number in range(pins.MOST_OF_A_BASE):
            assert pins.pin(session, f"many/p{number:05}", True).pinned
        with pytest.raises(Refused, match="256 policies") as refusal:
            pins.pin(session, f"many/p{pins.MOST_OF_A_BASE:05}", True)
        assert (refusal.value.status, refusal.value.code) == (409, "too_many_pins")
        pins.pin(session, "many/p00000", True)
        pins.pin(session, "many/p00000", False)
        assert pins.pin(session, f"many/p{pins.MOST_OF_A_BASE:05}", True).pinned

    await lab.database.write(check)
