"""The REST routes of the Tinker API and of the mint extensions, in one table, and what `/mint/v1` has beside them.

Checkpoint ids are `<kind>/<name>`, so that their two parts are two segments and a checkpoint may be called `archive`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.edge import EdgeRoute, request_id
from services.gateway.errors import problem_of
from services.gateway.mint_v1.documented import TOO_LARGE, add, documented_router
from services.gateway.tinker.archive import archive_link, send_archive
from services.gateway.tinker.extensions import forward_backward_reverse_kl
from services.gateway.tinker.rest import checkpoints, runs
from services.gateway.tinker.rest.adapters import import_adapter
from services.gateway.tinker.rest.interpolation import interpolate_checkpoints
from services.gateway.tinker.rest.unsupported import UNSUPPORTED, unsupported

__all__ = ["adapters_router", "rest_router"]


def rest_router(route: type[EdgeRoute]) -> APIRouter:
    """Include it before a router that has a route for every path."""
    router = APIRouter(prefix="/api/v1", route_class=route, tags=["tinker"], include_in_schema=False)
    get, post, put, delete = ["GET"], ["POST"], ["PUT"], ["DELETE"]
    for method, path, what, instead in UNSUPPORTED:
        router.add_api_route(path, unsupported(what, instead), methods=[method])
    one = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    router.add_api_route(f"{one}/archive", archive_link, methods=get)
    router.add_api_route(f"{one}/publish", checkpoints.publish, methods=post, status_code=204)
    router.add_api_route(f"{one}/publish", checkpoints.unpublish, methods=delete, status_code=204)
    router.add_api_route(f"{one}/ttl", checkpoints.set_ttl, methods=put, status_code=204)
    router.add_api_route(one, checkpoints.delete_checkpoint, methods=delete, status_code=204)
    router.add_api_route("/training_runs/{run_id}/checkpoints", runs.list_checkpoints, methods=get)
    router.add_api_route("/training_runs/{run_id}", runs.show_run, methods=get)
    router.add_api_route("/training_runs", runs.list_runs, methods=get)
    router.add_api_route("/checkpoints", runs.list_user_checkpoints, methods=get)
    router.add_api_route("/weights_info", checkpoints.weights_info, methods=post)
    router.add_api_route("/copy_weights", checkpoints.copy_weights, methods=post)
    router.add_api_route("/sessions", runs.list_sessions, methods=get)
    router.add_api_route("/sessions/{session_id}", runs.show_session, methods=get)
    router.add_api_route("/mint/forward_backward_reverse_kl", forward_backward_reverse_kl, methods=post)
    router.add_api_route("/mint/checkpoints/interpolate", interpolate_checkpoints, methods=post)
    links = APIRouter(route_class=_without_key(route))
    links.add_api_route("/archives/{run_id}/{kind}/{file}", send_archive, methods=get)
    router.include_router(links)
    return router


def adapters_router(route: type[EdgeRoute]) -> APIRouter:
    """What `/mint/v1` has for adapters made elsewhere; include it before `mint_router`."""
    router = documented_router(route)
    made: Any = {"status_code": 201, "responses": TOO_LARGE}
    add(router, "POST", "/adapters", import_adapter, "Import a PEFT adapter made elsewhere", **made)
    return router


class _WithoutKey(EdgeRoute):
    """For links that carry their own proof."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = APIRoute.get_route_handler(self)
        gateway, render = self.gateway, self.render

        async def handle(request: Request) -> Response:
            response: Response
            try:
                request.state.gateway = gateway
                response = await inner(request)
            except Exception as error:
                response = render(problem_of(error, request_id(request)))
            response.headers["x-request-id"] = request_id(request)
            return response

        return handle


def _without_key(route: type[EdgeRoute]) -> type[EdgeRoute]:
    class Linked(_WithoutKey):
        gateway = route.gateway
        render = staticmethod(route.render)

    return Linked
