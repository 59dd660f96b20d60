"""`mint key create`, `list`, `revoke`: who may use the system, and no longer."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Data, Json, Limit, Url, connect
from cli.terminal import err, out, print_table, show


class Kind(StrEnum):
    tml = "tml"
    sk = "sk"


def create(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose policies, runs and data the key may see.")],
    label: Annotated[str, typer.Option(help="For people.")] = "",
    kind: Annotated[Kind, typer.Option(help="What the key begins with; Tinker clients want tml-.")] = Kind.tml,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Make a key for a tenant; it is shown this once."""
    with connect(url, data) as gateway:
        made = gateway.post("/mint/v1/keys", {"tenant": tenant, "label": label, "kind": kind.value})
    show(made, json, _print_made)


def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    limit: Limit = 50,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """The keys, latest first, without their text; revoked ones too."""
    with connect(url, data) as gateway:
        found = gateway.pages("/mint/v1/keys", limit, tenant=tenant)
    rows = [
        (it["key_id"], it["tenant"], it["kind"], it["label"] or None, it["created_at"], it["revoked_at"])
        for it in found
    ]
    show(found, json, lambda _: print_table(("key", "tenant", "kind", "label", "created", "revoked"), rows))


def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="As `mint key list` shows it.")],
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """End a key, within 10 seconds everywhere; what was made with it stays."""
    with connect(url, data) as gateway:
        ended = gateway.delete(f"/mint/v1/keys/{quote(key_id, safe='')}")
    show(ended, json, lambda it: out.print(f"key {it['key_id']} of {it['tenant']} revoked", markup=False))


def _print_made(made: dict[str, Any]) -> None:
    """The key alone on standard output, so that it can be piped to where it is kept."""
    out.print(made["key"], markup=False)
    err.print(f"key {made['key_id']} of {made['tenant']}; it is not shown again", markup=False)
