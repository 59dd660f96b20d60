"""The edge of every route: key, request id, and the error shape of its API.

In: a request. Out: the handler's answer, or its failure as an answer. Handlers are free functions that
take `Here` (the gateway's parts) and `Caller` (who asks). Invariant: no handler runs, and no body is
read, before the key is known.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fastapi import Depends
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from opentelemetry.trace import get_current_span
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.anything import register_anything
from services.gateway.config import GatewaySettings
from services.gateway.errors import Problem, mint_answer, openai_answer, problem_of
from services.gateway.identity import Identity, Keys
from services.gateway.ports import Catalog, Publisher, Replicas, Tiers
from services.gateway.resolution import Resolver
from services.gateway.tinker.ports import Operations
from shared.bases import Base
from shared.errors import Refused, Retryable
from shared.sampling.port import Sampler
from shared.store.port import ObjectStore
from shared.telemetry import log_fields
from shared.text.codec import TextCodec

__all__ = ["Caller", "EdgeRoute", "Gateway", "Here", "bounded", "edge_routes", "no_such_route", "request_id"]

register_anything()

LARGE_AT_A_TIME = 4
HEAVY_AT_A_TIME = 2
UNCHECKED_PAUSE_S = 1.0
"""Before a 503 to whose key cannot be checked."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class Gateway:
    """The parts that handlers work with; `codecs` by the base model's public name. `large` and `heavy` bound, over all
    requests, how many large bodies are decoded and how many adapters are packed, read or combined at a time: each
    takes a thread of the few there are, and memory of many times its size."""

    settings: GatewaySettings
    keys: Keys
    bases: Mapping[str, Base]
    codecs: Mapping[str, TextCodec]
    catalog: Catalog
    operations: Operations
    resolver: Resolver
    sampler: Sampler
    replicas: Replicas
    tiers: Tiers
    store: ObjectStore
    bus: Publisher
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_A_TIME))
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HEAVY_AT_A_TIME))


class EdgeRoute(APIRoute):
    """Subclasses say whose parts, and which error shape."""

    gateway: ClassVar[Gateway]

    @staticmethod
    def render(problem: Problem) -> JSONResponse:
        raise NotImplementedError

    @classmethod
    def admit(cls, request: Request) -> Request:
        """A request whose body is about to be read, bounded."""
        return bounded(request, cls.gateway.settings.gateway_max_json_bytes)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Here, and not around the handler, so that a streamed answer is logged with its request too.
        The span is the service shell's; it gets the id and the route."""
        given = Headers(scope=scope).get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope["mint_request_id"] = number
        get_current_span().set_attributes({"mint.request_id": number, "http.route": self.path_format})
        with log_fields(request_id=number):
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()
        gateway, render, admit, has_body = self.gateway, self.render, self.admit, self.body_field is not None

        async def handle(request: Request) -> Response:
            response: Response
            identity: Identity | None = None
            try:
                request.state.gateway = gateway
                identity = await gateway.keys.identify(request)
                request.state.identity = identity
                if has_body:
                    request = admit(request)
                response = await inner(request)
            except Exception as error:
                if identity is None and isinstance(error, Retryable):
                    # Some clients ask again at once, each for all that it waits for.
                    await asyncio.sleep(UNCHECKED_PAUSE_S)
                response = render(problem_of(error, request_id(request)))
            response.headers["x-request-id"] = request_id(request)
            if identity is not None and identity.stale:
                response.headers["mint-key"] = "stale"
            return response

        return handle


def edge_routes(parts: Gateway) -> tuple[type[EdgeRoute], type[EdgeRoute]]:
    """The route classes of `/v1` and of `/mint/v1`."""

    class OpenAIRoute(EdgeRoute):
        gateway = parts
        render = staticmethod(openai_answer)

    class MintRoute(EdgeRoute):
        gateway = parts
        render = staticmethod(mint_answer)

    return OpenAIRoute, MintRoute


def request_id(request: Request) -> str:
    return str(request.scope["mint_request_id"])


def bounded(request: Request, bound: int) -> Request:
    """The same request, whose body ends in a 413 once it is longer than `bound` bytes."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > bound:
            raise HTTPException(413, f"the body has more than {bound} bytes, which is what is allowed here")
        return message

    return Request(request.scope, receive)


class WrongMethod(Refused):
    """`allow`: the methods that the path has."""

    def __init__(self, method: str, path: str, allow: str) -> None:
        super().__init__(f"{method} is not for {path}; {allow} is", code="method_not_allowed", status=405)
        self.allow = allow


async def no_such_route(request: Request) -> Response:
    """405 with what is allowed where the path is there, else 404."""
    path, allowed = request.scope["path"], set[str]()
    for known in request.app.routes:
        if isinstance(known, APIRoute) and known.endpoint is not no_such_route and known.path_regex.match(path):
            allowed |= known.methods
    if allowed:
        raise WrongMethod(request.method, path, ", ".join(sorted(allowed)))
    raise Refused(f"there is no route {request.method} {request.url.path}", code="not_found", status=404)


def _gateway(request: Request) -> Gateway:
    found: Gateway = request.state.gateway
    return found


def _identity(request: Request) -> Identity:
    found: Identity = request.state.identity
    return found


Here = Annotated[Gateway, Depends(_gateway)]
Caller = Annotated[Identity, Depends(_identity)]
