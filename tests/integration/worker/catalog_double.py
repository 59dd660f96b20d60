"""A small catalog: leases with epochs, commits that are conditional on them, the events that won.

Only what workers talk to. It speaks the real HTTP API, so that the real client is in the test.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from shared.catalog.api import (
    CommitAnswer,
    CommitRequest,
    EvaluationResult,
    LeaseRequest,
    OutgoingEvent,
    RenewAnswer,
    TakeAnswer,
    TakeRequest,
)


@dataclass
class Held:
    worker: str = ""
    epoch: int = 0
    until: float = 0.0
    takes: int = 0
    event: OutgoingEvent | None = None


@dataclass
class CatalogDouble:
    """`ended`: runs that are over; `exhausted`: commands taken too often; `forgotten`: leases are not
    renewed, as if the worker were cut off."""

    ttl_s: float = 30.0
    ended: set[str] = field(default_factory=set)
    exhausted: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    commands: dict[str, Held] = field(default_factory=dict)
    releases: list[LeaseRequest] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(self.router())
        return app

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/internal/v1/commands")
        router.add_api_route("/take", self.take, methods=["POST"])
        router.add_api_route("/renew", self.renew, methods=["POST"])
        router.add_api_route("/release", self.release, methods=["POST"])
        router.add_api_route("/commit", self.commit, methods=["POST"], response_model=None)
        return router

    def held(self, command_id: str) -> Held:
        return self.commands.setdefault(command_id, Held())

    async def take(self, request: TakeRequest) -> TakeAnswer:
        held, now = self.held(request.command_id), time.monotonic()
        if held.event is not None:
            return TakeAnswer(status="committed", event=held.event)
        if request.command_id.split(":")[0] in self.ended:
            return TakeAnswer(status="closed", reason="the run is cancelled")
        if request.command_id in self.exhausted:
            return TakeAnswer(status="exhausted", reason="taken 5 times without a commit")
        if held.until > now and held.worker != request.worker:
            return TakeAnswer(status="busy", retry_after_s=held.until - now)
        held.worker, held.epoch, held.until = request.worker, held.epoch + 1, now + self.ttl_s
        held.takes += 1
        return TakeAnswer(status="granted", epoch=held.epoch)

    async def renew(self, request: LeaseRequest) -> RenewAnswer:
        held = self.held(request.command_id)
        if request.command_id.split(":")[0] in self.ended:
            return RenewAnswer(held=False, cancelled=True)
        if held.epoch != request.epoch:
            return RenewAnswer(held=False)
        if request.worker not in self.cut_off:
            held.until = time.monotonic() + self.ttl_s
        return RenewAnswer(held=True)

    async def release(self, request: LeaseRequest) -> dict[str, str]:
        held = self.held(request.command_id)
        self.releases.append(request)
        if held.epoch == request.epoch:
            held.until = 0.0
        return {}

    async def commit(self, request: CommitRequest) -> CommitAnswer | JSONResponse:
        held = self.held(request.command_id)
        if request.command_id.split(":")[0] in self.ended:
            return self._refuse("run_ended", "the run is over")
        if held.event is None:
            if held.epoch != request.epoch:
                return self._refuse("stale_epoch", f"epoch {request.epoch} is not {held.epoch}")
            held.event = _event(request)
        return CommitAnswer(event=held.event)

    def _refuse(self, code: str, message: str) -> JSONResponse:
        self.refused.append(code)
        return JSONResponse({"error": {"code": code, "message": message}}, 409)


def _event(request: CommitRequest) -> OutgoingEvent:
    result = request.result
    assert isinstance(result, EvaluationResult)
    run_id = request.command_id.split(":")[0]
    body = {
        **result.model_dump(mode="json", exclude={"kind"}),
        "run_id": run_id,
        "policy": "acme/adder",
        "base": "tiny/llama",
        "command_id": request.command_id,
    }
    return OutgoingEvent(
        type="mint.v1.revision.evaluated",
        id=f"{run_id}:evaluated",
        token="tiny-llama",
        subject="acme/adder",
        body=body,
    )
