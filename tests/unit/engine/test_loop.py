"""What the loop around a model makes of a model that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.engine.fake import FakeModel, fake_engine
from shared.engine.port import AdapterRefused, EngineError
from shared.engine.settings import EngineSettings
from tests.adapters import write_adapter
from tests.serving_kit import make_base


@pytest.mark.parametrize(
    "fault", [MemoryError(), OSError(24, "Too many open files"), RuntimeError("no room")], ids=repr
)
async def test_an_admitted_adapter_that_cannot_be_applied_now_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """A refusal would stand for good; the next load finds nothing left of this one."""
    base = make_base(tmp_path / "base")
    manifest = write_adapter(tmp_path / "adapter", base, "acme/adder@1")
    engine = fake_engine(base, EngineSettings(tmp_path / "state", slots=1, max_resident=1))

    def fails(*args: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(FakeModel, "add", fails)
        with pytest.raises(EngineError, match="acme/adder@1 could not be applied") as raised:
            await engine.load(manifest, tmp_path / "adapter")
    assert not isinstance(raised.value, AdapterRefused)
    assert await engine.resident() == []
    await engine.load(manifest, tmp_path / "adapter")
    assert [held.revision for held in await engine.resident()] == ["acme/adder@1"]
    await engine.close()
