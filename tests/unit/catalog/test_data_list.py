"""A tenant's files, by pages."""

from __future__ import annotations

import pytest
from mint_schemas.common import FileRef

from services.catalog import datarefs
from shared.catalog.api import DataView
from shared.errors import Refused
from tests.catalog_kit import Lab


def _register(lab: Lab, tenant: str, sha256: str) -> None:
    ref = FileRef(key=f"data/{tenant}/{sha256}", sha256=sha256, size=7)
    lab.database.write_now(datarefs.register, tenant, ref, lab.clock())


def test_each_file_of_the_tenant_stands_on_one_page(lab: Lab) -> None:
    digests = [f"{number:x}" * 64 for number in (3, 1, 2, 5, 4)]
    for sha256 in digests:
        _register(lab, "acme", sha256)
        _register(lab, "beta", sha256)
    seen: list[DataView] = []
    cursor = None
    while True:
        page = lab.database.read_now(datarefs.list_data, "acme", 2, cursor)
        seen += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    assert [view.sha256 for view in seen] == sorted(digests)
    assert {view.key.split("/")[1] for view in seen} == {"acme"}
    assert seen[0].size == 7
    assert lab.database.read_now(datarefs.list_data, "other", 2, None).items == []


def test_what_is_no_cursor_is_refused(lab: Lab) -> None:
    with pytest.raises(Refused, match="no cursor"):
        lab.database.read_now(datarefs.list_data, "acme", 2, "a")
