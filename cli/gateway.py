"""The gateway over HTTP, as the command line and the demo use it: one method per thing that is asked.

Where it is: `--url`, else MINT_URL, else the stack file of the data directory. Every failure becomes a
CliError whose text is the gateway's own message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from cli.errors import BAD_INPUT, FAILED, UNREACHABLE, CliError
from cli.stack.datadir import default_data_dir
from cli.stack.file import read_stack

LOCAL_KEY = "tml-dev"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ServerEvent:
    """One server-sent event: its name, its text, its id for continuing after it."""

    event: str
    data: str
    id: str


def gateway_url(url: str | None, data: Path | None = None) -> str:
    """Raises CliError when nothing says where the gateway is."""
    found = url or os.environ.get("MINT_URL")
    if found:
        return found.rstrip("/")
    directory = data or default_data_dir()
    stack = read_stack(directory)
    if stack is None or "gateway" not in stack.ports:
        raise CliError(
            f"no stack in {directory}; start one with mint up, or name a gateway with --url or MINT_URL", UNREACHABLE
        )
    return stack.url("gateway")


class Gateway:
    """A client for one command; close it, or use it in a `with`."""

    def __init__(self, url: str, key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        key = key or os.environ.get("MINT_API_KEY") or LOCAL_KEY
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            trust_env=False,
            transport=transport,
        )

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._call("GET", path, params={key: value for key, value in query.items() if value is not None})

    def post(self, path: str, body: Any) -> Any:
        return self._call("POST", path, json=body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def post_with_headers(self, path: str, body: Any) -> tuple[Any, httpx.Headers]:
        answer = self._send("POST", path, json=body)
        return answer.json(), answer.headers

    def pages(self, path: str, limit: int, **query: Any) -> list[dict[str, Any]]:
        """Up to `limit` items of a paged list, over as many pages as it takes."""
        items: list[dict[str, Any]] = []
        cursor = None
        while len(items) < limit:
            page = self.get(path, limit=min(limit - len(items), 100), cursor=cursor, **query)
            items.extend(page["items"])
            cursor = page.get("next_cursor")
            if cursor is None:
                break
        return items

    def upload(self, path: Path, tenant: str | None = None) -> dict[str, Any]:
        with path.open("rb") as file:
            found: dict[str, Any] = self._call(
                "POST", "/mint/v1/data", content=file, params={} if tenant is None else {"tenant": tenant}
            )
            return found

    def events(self, path: str, after: str | None = None) -> Iterator[ServerEvent]:
        """Server-sent events until the server ends the stream; `after` continues behind an event id."""
        return self._stream("GET", path, headers={} if after is None else {"Last-Event-ID": after})

    def _stream(
        self, method: str, path: str, headers: dict[str, str] | None = None, **body: Any
    ) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream", **(headers or {})}
        try:
            with self._http.stream(method, path, headers=headers, **body) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _refused(answer)
                yield from _parse_events(answer.iter_lines())
        except httpx.HTTPError as error:
            raise _unreachable(self.url, error) from error

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The JSON chunks of an OpenAI stream, up to its `[DONE]`."""
        for event in self._stream("POST", path, json=body):
            if event.data == "[DONE]":
                return
            yield json.loads(event.data)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._send(method, path, **arguments).json()

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise _unreachable(self.url, error) from error
        if answer.status_code >= 400:
            raise _refused(answer)
        return answer


def policy_path(policy: str) -> str:
    """`tenant/policy` as path; a bad name is left to the gateway to refuse, quoted."""
    tenant, _, name = policy.partition("/")
    if not tenant or not name:
        raise CliError(f"{policy!r} is no policy; write tenant/policy", BAD_INPUT)
    return f"/mint/v1/policies/{quote(tenant, safe='')}/{quote(name, safe='')}"


def run_path(run_id: str) -> str:
    return f"/mint/v1/runs/{quote(run_id, safe='')}"


def _parse_events(lines: Iterator[str]) -> Iterator[ServerEvent]:
    event, data, number = "message", [], ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "id":
            number = value
        elif field == "data":
            data.append(value)
        elif not line:
            if data:
                yield ServerEvent(event, "\n".join(data), number)
            event, data = "message", []


def _unreachable(url: str, error: Exception) -> CliError:
    return CliError(
        f"the gateway at {url} does not answer ({error or type(error).__name__}); see mint status", UNREACHABLE
    )


def _refused(answer: httpx.Response) -> CliError:
    code = BAD_INPUT if answer.status_code in (400, 404, 409, 413, 422) else FAILED
    code = UNREACHABLE if answer.status_code == 503 else code
    try:
        body = answer.json()
    except ValueError:
        return CliError(f"the gateway answers {answer.status_code}: {answer.text.strip()[:300]}", code)
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return CliError(str(error), code)
    message = str(error.get("message") or error.get("detail") or error)
    near = [name for name in error.get("near") or [] if name not in message]
    return CliError(message + (f" (did you mean {', '.join(near)}?)" if near else ""), code)
