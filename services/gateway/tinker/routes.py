"""The routes of `/api/v1` as Tinker clients call them, in one table.

Sessions, models, operations, samples and futures; what is read and changed by REST is in `rest/routes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.documented import EVERY_METHOD
from services.gateway.edge import EdgeRoute, Gateway, no_such_route
from services.gateway.tinker import completions, futures, models, operations, sampling, service, sessions, weights
from services.gateway.tinker.body import plain
from services.gateway.tinker.errors import tinker_answer

__all__ = ["tinker_route", "tinker_router"]

POSTED: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("/client/config", service.client_config),
    ("/client/dynamic_config", service.dynamic_config),
    ("/auth/token", service.auth_token),
    ("/telemetry", service.telemetry),
    ("/create_session", sessions.begin_session),
    ("/session_heartbeat", sessions.session_heartbeat),
    ("/create_model", models.create_model),
    ("/get_info", models.get_info),
    ("/unload_model", models.unload_model),
    ("/forward", operations.forward),
    ("/forward_backward", operations.forward_backward),
    ("/optim_step", operations.optim_step),
    ("/save_weights", weights.save_weights),
    ("/save_weights_for_sampler", weights.save_weights_for_sampler),
    ("/save_weights_external", weights.save_weights_external),
    ("/load_weights", weights.load_weights),
    ("/create_sampling_session", sampling.create_sampling_session),
    ("/asample", sampling.asample),
    ("/join_sampling_session", completions.join_sampling_session),
    ("/retrieve_future", futures.retrieve_future),
    ("/retrieve_futures", completions.retrieve_futures),
    ("/cancel_future", sampling.cancel_future),
)

MESSAGE_BYTES = 1 << 20
"""Of JSON that is parsed in the event loop; data and prompts are read by their handlers."""


def tinker_route(parts: Gateway) -> type[EdgeRoute]:
    class TinkerRoute(EdgeRoute):
        gateway = parts
        render = staticmethod(tinker_answer)

        @classmethod
        def admit(cls, request: Request) -> Request:
            return plain(request, min(MESSAGE_BYTES, parts.settings.gateway_max_json_bytes))

    return TinkerRoute


def tinker_router(route: type[EdgeRoute]) -> APIRouter:
    router = APIRouter(prefix="/api/v1", route_class=route, tags=["tinker"], include_in_schema=False)
    get, post = ["GET"], ["POST"]
    for path, handler in POSTED:
        router.add_api_route(path, handler, methods=post)
    router.add_api_route("/sessions/{session_id}/finish", sessions.finish_session, methods=post, status_code=204)
    router.add_api_route("/samplers/{sampler_id}", sampling.get_sampler, methods=get)
    router.add_api_route("/healthz", service.healthz, methods=get)
    router.add_api_route("/get_server_capabilities", service.server_capabilities, methods=get)
    router.add_api_route("/{rest:anything}", no_such_route, methods=EVERY_METHOD)
    return router
