"""Attempt files, the lease as a job sees it, and fault points."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.catalog import api
from shared.errors import Fatal, Refused, Retryable
from shared.store.memory import MemoryStore
from shared.store.port import KeyTaken
from shared.worker import AttemptFiles, Faults, LeaseLost, LeaseView

ABOUT = "r1:update:3"


class Renewals:
    def __init__(self, *answers: api.RenewAnswer | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def renew(self) -> api.RenewAnswer:
        self.asked += 1
        answer = self._answers.pop(0) if self._answers else api.RenewAnswer(held=True)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_files_of_two_attempts_never_meet(tmp_path: Path) -> None:
    store = MemoryStore()
    first, second = (AttemptFiles(store, "r1", "r1:update:3") for _ in range(2))
    one = await first.put("adapter.safetensors", b"one")
    two = await second.put("adapter.safetensors", b"two")
    assert one.key == f"attempts/r1/update-3/{first.attempt_id}/adapter.safetensors"
    assert one.key != two.key
    with pytest.raises(KeyTaken):
        await first.put("adapter.safetensors", b"other")


async def test_blobs_are_shared(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "file"
    path.write_bytes(b"adapter")
    from_bytes = await AttemptFiles(store, "r1", "r1:export:1").put_blob(b"adapter")
    from_file = await AttemptFiles(store, "r2", "r2:export:1").put_blob(path)
    assert from_bytes == from_file
    assert from_bytes.key == f"blobs/sha256/{hashlib.sha256(b'adapter').hexdigest()}"


async def test_a_lease_is_renewed_while_held() -> None:
    renewals = Renewals(Retryable("away for a moment"))
    async with LeaseView(renewals.renew, 2, ABOUT, every_s=0.02) as lease:
        await asyncio.sleep(0.15)
        lease.check()
    asked = renewals.asked
    assert asked >= 3
    await asyncio.sleep(0.06)
    assert renewals.asked == asked


@pytest.mark.parametrize(
    ("answer", "words", "cancelled"),
    [
        (api.RenewAnswer(held=False), "another worker holds the lease of r1:update:3", False),
        (api.RenewAnswer(held=False, cancelled=True), "the run of r1:update:3 is over", True),
        (api.RenewAnswer(held=True, cancelled=True), "the run of r1:update:3 is over", True),
        (Refused("no such command", "not_found", status=404), "another worker holds", False),
    ],
)
async def test_a_lost_lease_is_told(answer: api.RenewAnswer | Exception, words: str, cancelled: bool) -> None:
    async with LeaseView(Renewals(answer).renew, 2, ABOUT, every_s=0.01) as lease:
        lease.check()
        await asyncio.sleep(0.05)
        with pytest.raises(LeaseLost, match=words) as lost:
            lease.check()
    assert lost.value.cancelled is cancelled


@pytest.mark.parametrize("trouble", [Retryable("away"), Fatal("what the catalog says cannot be read")])
async def test_a_lease_that_nobody_renews_runs_out(trouble: Exception) -> None:
    renewals = Renewals(*(trouble for _ in range(100)))
    async with LeaseView(renewals.renew, 2, ABOUT, every_s=0.01, ttl_s=0.05) as lease:
        await asyncio.sleep(0.1)
        with pytest.raises(LeaseLost, match="ran out"):
            lease.check()


def test_no_fault_no_effect(tmp_path: Path) -> None:
    for faults in (Faults("learner"), Faults("learner", "exporter:after_row", tmp_path)):
        for point in ("before_files", "after_files", "after_row", "after_publish"):
            faults.hit(point)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["learner", "learner:sometime", ":", "learner:"])
def test_a_fault_that_cannot_be_is_refused(fault: str, tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="write <service>:<one of before_files"):
        Faults("learner", fault, tmp_path)


def test_a_fault_kills_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from shared.worker.faults import Faults\n"
        "f = Faults('learner', 'learner:after_row', Path(sys.argv[1])); f.hit('after_files'); f.hit('after_row')"
    )
    ends = [subprocess.run([sys.executable, "-c", script, tmp_path / "faults"]).returncode for _ in range(2)]
    assert ends == [-signal.SIGKILL, 0]
