"""Pages of a large catalog: what one reads does not grow with what stands before it or around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from services.catalog.database import Database
from services.catalog.listing import list_policies
from tests.catalog_kit import Lab

POLICIES = 100_000
LIVE = 50_000
"""acme/p000000 to acme/p049999 are live, beta/p050000 to beta/p099998 are not, zeta/p099999 is."""

PAGE = 50


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    lab = Lab(tmp_path_factory.mktemp("large"))
    with lab.database.engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {POLICIES - 1}) "
        tenant = f"CASE WHEN i < {LIVE} THEN 'acme' WHEN i < {POLICIES - 1} THEN 'beta' ELSE 'zeta' END"
        connection.exec_driver_sql(
            "INSERT INTO policies (policy, tenant, base, created_at, last_number) "
            f"{numbers} SELECT {tenant} || printf('/p%06d', i), {tenant}, 'tiny/llama', 0.0, 1 FROM n"
        )
        runs = "run_id, token, base, state, outcome, request, request_source, request_id, traceparent, created_at"
        values = "'r', 't', 'tiny/llama', 'completed', '', '{}', '', '', '', 0.0"
        connection.exec_driver_sql(f"INSERT INTO runs ({runs}, steps, promoted) VALUES ({values}, 1, 1)")
        revisions = "revision, policy, number, base, run_id, step, export_command, adapter_sha256, adapter_bytes"
        connection.exec_driver_sql(
            f"INSERT INTO revisions ({revisions}, zero_delta, manifest, created_at) "
            "VALUES ('acme/p000000@1', 'acme/p000000', 1, 'tiny/llama', 'r', 1, 'e', 'd', 1, 0, '{}', 0)"
        )
        for alias, which in (("live", "tenant != 'beta'"), ("canary", "tenant = 'beta'")):
            connection.exec_driver_sql(
                "INSERT INTO aliases (policy, alias, revision, version) "
                f"SELECT policy, '{alias}', 'acme/p000000@1', 1 FROM policies WHERE {which}"
            )
    yield lab.database
    lab.close()


def _steps(database: Database, tenant: str | None, after: str | None) -> tuple[int, list[str]]:
    """The virtual machine's instructions for one page, which count the rows that it reads; and the page."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def read(session: Session) -> list[str]:
        connection = session.connection().connection.driver_connection
        assert connection is not None
        connection.set_progress_handler(count, 1)
        try:
            found = list_policies(session, tenant, PAGE, None, "live", after)
        finally:
            connection.set_progress_handler(None, 0)
        return [view.policy for view in found.items]

    names = database.read_now(read)
    return steps, names


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_page_deep_in_100000_policies_reads_what_the_first_one_reads(large: Database, tenant: str | None) -> None:
    first, names = _steps(large, tenant, None)
    deep, later = _steps(large, tenant, "acme/p049899")
    assert names == [f"acme/p{i:06}" for i in range(PAGE)]
    assert later == [f"acme/p{i:06}" for i in range(49_900, 49_900 + PAGE)]
    assert abs(deep - first) < 20
    assert first < 200 * PAGE


def test_what_lacks_the_alias_is_not_read(large: Database) -> None:
    """49,999 policies that are not live stand between the last of acme and the first of zeta."""
    first, _ = _steps(large, None, None)
    across, names = _steps(large, None, "acme/p049990")
    assert names == [*(f"acme/p{i:06}" for i in range(49_991, 50_000)), "zeta/p099999"]
    assert across < first
    none, nothing = _steps(large, "beta", None)
    assert nothing == []
    assert none < first


def test_pages_put_together_are_every_live_policy_once(large: Database) -> None:
    names: list[str] = ["acme/p049299"]
    while True:
        page = large.read_now(list_policies, "acme", 300, None, "live", names[-1])
        names += [view.policy for view in page.items]
        if page.next_cursor is None:
            break
    assert names == [f"acme/p{i:06}" for i in range(49_299, LIVE)]


def test_an_opaque_cursor_and_a_name_lead_to_the_same_page(large: Database) -> None:
    first = large.read_now(list_policies, None, PAGE, None, "live", None)
    by_cursor = large.read_now(list_policies, None, PAGE, first.next_cursor, "live", None)
    by_name = large.read_now(list_policies, None, PAGE, None, "live", first.items[-1].policy)
    assert by_cursor == by_name


def test_a_cursor_of_elsewhere_leads_to_no_other_tenants_policies(large: Database) -> None:
    everything = large.read_now(list_policies, None, 1, None)
    assert everything.next_cursor is not None
    (only,) = large.read_now(list_policies, "zeta", PAGE, everything.next_cursor).items
    assert only.policy == "zeta/p099999"
    assert large.read_now(list_policies, "zeta", PAGE, None, "live", "acme/").items == [only]
