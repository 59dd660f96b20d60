"""A client of the Tinker protocol that costs little itself: JSON over HTTP, without an SDK, the same to any server.

In: a server's URL. Out: answers and results of operations. A failure, of a request or of an operation, is a
RuntimeError in the server's own words.
"""

from __future__ import annotations

from typing import Any, Self

import httpx

from loadtests.population.client import LOCAL_KEY

__all__ = ["Wire"]

TIMEOUT_S = 600.0


class Wire:
    """One connection pool and one session. `async with Wire(url) as wire: …`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            headers={"X-API-Key": LOCAL_KEY},
            timeout=httpx.Timeout(TIMEOUT_S),
            trust_env=False,
        )
        self.session = ""

    async def __aenter__(self) -> Self:
        begun = await self.post("create_session", tags=[], sdk_version="0.0.0")
        self.session = begun["session_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self._http.post(path, json=body)
        if not answer.is_success:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else None

    async def finish(self) -> None:
        """The session, and with it its models. Not every server has that."""
        await self.post(f"sessions/{self.session}/finish", reason={"type": "done"})

    async def result(self, future: Any) -> Any:
        """Of an operation's future, however long it takes."""
        while True:
            answer = await self.post("retrieve_future", request_id=future["request_id"])
            if "error" in answer:
                raise RuntimeError(f"operation {future['request_id']}: {answer['error']}")
            if answer.get("type") != "try_again":
                return answer

    async def call(self, path: str, **body: Any) -> Any:
        """The result of the operation that the request begins."""
        return await self.result(await self.post(path, **body))
