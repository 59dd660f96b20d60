"""`mint policies`, `revisions`, `alias`, `rollback`, `pin`, `chat`: what there is, what is live, what it says."""

from __future__ import annotations

import json as json_text
import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.chat import complete, stream
from cli.errors import BAD_INPUT, CliError
from cli.gateway import Gateway, policy_path
from cli.options import Data, Json, Limit, Url, connect
from cli.terminal import err, out, print_table, show

Force = Annotated[bool, typer.Option("--force", help="Move at once, ready or not: requests then wait for the load.")]


def policies(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    limit: Limit = 50,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """The policies and what their aliases point at."""
    with connect(url, data) as gateway:
        found = gateway.pages("/mint/v1/policies", limit, tenant=tenant)
    rows = [(it["policy"], it["base"], it["revisions"], _aliases(it["aliases"]), it["active_run"]) for it in found]
    show(found, json, lambda _: print_table(("policy", "base", "revisions", "aliases", "active run"), rows))


def revisions(policy: str, limit: Limit = 50, url: Url = None, data: Data = None, json: Json = False) -> None:
    """A policy's revisions: where they come from, what they score, where they are ready."""
    with connect(url, data) as gateway:
        found = gateway.pages(f"{policy_path(policy)}/revisions", limit)
    rows = [
        (
            it["revision"],
            it["parent"],
            it["step"],
            "–" if it["score"] is None else f"{it['score']:.3f}",
            ", ".join(it["aliases"]),
            len(it["ready_on"]),
            it["adapter_sha256"][:12],
        )
        for it in found
    ]
    columns = ("revision", "parent", "step", "score", "aliases", "ready on", "adapter")
    show(found, json, lambda _: print_table(columns, rows))


def alias(
    policy: str,
    name: Annotated[str, typer.Argument(metavar="ALIAS")],
    revision: Annotated[str, typer.Argument(help="A revision: its number or its reference.")],
    expected_version: Annotated[int | None, typer.Option(help="Move only if the alias has this version.")] = None,
    force: Force = False,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Point an alias at a revision."""
    target = f"{policy}@{revision}" if revision.isdecimal() else revision
    body = {"revision": target, "expected_version": expected_version, "force": force}
    with connect(url, data) as gateway:
        moved = gateway.post(f"{policy_path(policy)}/aliases/{quote(name, safe='')}", body)
    show(moved, json, _print_move)


def rollback(
    policy: str,
    to: Annotated[
        str | None, typer.Option(help="A revision: its number or its reference (default: the one before).")
    ] = None,
    alias_name: Annotated[str, typer.Option("--alias", help="The alias to move.")] = "live",
    force: Force = False,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Move an alias back."""
    target = f"{policy}@{to}" if to is not None and to.isdecimal() else to
    with connect(url, data) as gateway:
        body = {"alias": alias_name, "to": target, "force": force}
        moved = gateway.post(f"{policy_path(policy)}/rollback", body)
    show(moved, json, _print_move)


def pin(
    policy: str,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Keep what the policy's aliases point at resident on every replica."""
    with connect(url, data) as gateway:
        found = gateway.post(f"{policy_path(policy)}/pin", {"pinned": not off})
    show(found, json, lambda it: out.print(f"{it['policy']}: {'pinned' if it['pinned'] else 'not pinned'}"))


def chat(
    reference: str,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this and end; else a conversation.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Talk to a policy, a revision of it, or a base model."""
    with connect(url, data) as gateway:
        request = {"model": reference, "max_tokens": max_tokens, "temperature": temperature}
        if message is None:
            _converse(gateway, request)
            return
        answer = complete(gateway, {**request, "messages": [{"role": "user", "content": message}]})
        show(answer, json, lambda it: out.print(it["text"], markup=False))
        if not json and answer["revision"]:
            err.print(f"[{answer['revision']}]", markup=False)


def _converse(gateway: Gateway, request: dict[str, Any]) -> None:
    if not sys.stdin.isatty():
        raise CliError("a conversation needs a terminal; pass one message with --message", BAD_INPUT)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("you> ")
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        for piece in stream(gateway, {**request, "messages": messages}):
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def _aliases(aliases: dict[str, str]) -> str:
    return json_text.dumps(aliases)[1:-1].replace('"', "")


def _print_move(moved: dict[str, Any]) -> None:
    was = f" (was {moved['previous']})" if moved.get("previous") else ""
    out.print(
        f"{moved['policy']}:{moved['alias']} → {moved['revision']}{was}, version {moved['version']}", markup=False
    )
