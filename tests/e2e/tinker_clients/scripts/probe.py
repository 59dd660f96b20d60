"""Every public method of every client class of the SDK, called once: what works, and what is refused in which words.

The methods are found by looking at the classes, so that a newer SDK's are seen; how to call them is in `calls.py`.
Prints the version, what became of each method and variant, and what went wrong otherwise: methods that nobody knows
how to call, answers that are not as they should be, and failures that are no user's.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import signal
import traceback
import warnings
from typing import Any

import desk
from calls import CALLS, VARIANTS, Ask, Scene
from desk import sdk

CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
PATIENCE_S = 100
RETRIED = (408, 409, 429)
VOLATILE = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:(train|sample):\d+)?|[0-9a-f]{32}|(?<=/tinker-)[0-9a-f]{12}"
)
"""Names that each run makes anew."""


def classes() -> dict[str, type]:
    """Raises AssertionError for a client class that is not among those above."""
    found: dict[str, type] = {}
    for module in (sdk, importlib.import_module("tinker.lib.public_interfaces")):
        for name in module.__all__:
            if name.endswith("Client"):
                assert name in CLASSES, f"nobody knows the client class {name}"
                found[name] = getattr(module, name)
    rest = importlib.import_module("tinker.lib.public_interfaces.rest_client")
    return {name: found.get(name) or getattr(rest, name) for name in CLASSES if name in found or hasattr(rest, name)}


def methods(found: type) -> list[str]:
    return [
        name
        for name, member in inspect.getmembers_static(found)
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property | staticmethod | classmethod))
    ]


def functions() -> dict[str, Any]:
    """What `mint` adds."""
    if desk.sdk.__name__ != "mint":
        return {}
    module = sdk.mint
    return {
        f"mint.{name}": getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))
    }


def entry(name: str) -> Any:
    """An `_async` form is called as the other one is."""
    return CALLS.get(name) or CALLS.get(name.removesuffix("_async"))


def answer(scene: Scene, name: str, asked: Ask) -> Any:
    owner, _, method = name.partition(".")
    if owner == "mint":
        return of_mint(scene, functions()[name], asked)
    on = asked.on if asked.on is not None else scene.object(owner)
    static = inspect.getattr_static(type(on), method)
    if isinstance(static, property):
        return getattr(on, method)
    bound = getattr(on, method)
    if asked.inside:
        return on.holder.run_coroutine_threadsafe(bound(*asked.args, **asked.more)).result()
    if inspect.iscoroutinefunction(inspect.unwrap(bound)) or method.endswith("_async"):
        return asyncio.run(awaited(bound, asked))
    found = bound(*asked.args, **asked.more)
    return found.result() if hasattr(found, "result") else found


async def awaited(bound: Any, asked: Ask) -> Any:
    found = await bound(*asked.args, **asked.more)
    if hasattr(found, "result_async"):
        return await found.result_async()
    return await found if inspect.isawaitable(found) else found


def of_mint(scene: Scene, function: Any, asked: Ask) -> Any:
    """Its coroutines belong on the loop of the client's own thread."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return scene.client.holder.run_coroutine_threadsafe(function(*asked.args, **asked.more)).result().result()
    return function(*asked.args, **asked.more)


def refusal(error: Exception) -> str | None:
    """The server's words, where it is the caller's to mend; None for every other failure."""
    status, category = getattr(error, "status_code", None), getattr(error, "category", None)
    body = getattr(error, "body", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in RETRIED and isinstance(body, dict):
        return str(body["error"])
    if getattr(category, "value", category) == "user":
        found = re.match(r"Request failed: (.*) for self\.request_id=", str(error), re.DOTALL)
        return found[1] if found else str(error)
    return None


def outcome(scene: Scene, name: str, call: Any, method: Any = None) -> dict[str, str] | None:
    """`text` of a refusal, or `wrong`: what is not as it should be. None where `method` has no such arguments."""
    by_client = False
    signal.alarm(PATIENCE_S)
    try:
        asked = call(scene)
        if method is not None and not known_arguments(method, asked):
            return None
        by_client = asked.by_client
        found = answer(scene, name, asked)
        if not asked.check(found):
            return {"wrong": f"the answer is {str(found)[:300]}"}
    except Exception as error:
        text = refusal(error)
        if text is None and not by_client:
            return {"wrong": "".join(traceback.format_exception(error, limit=-4))[-3000:]}
        return {"text": VOLATILE.sub("…", text or f"the client itself: {error}")}
    finally:
        signal.alarm(0)
    return {}


def known_arguments(method: Any, asked: Ask) -> bool:
    parameters = inspect.signature(method).parameters
    return set(asked.more) <= set(parameters)


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, late)
    scene, found = Scene(), classes()
    names = [f"{owner}.{name}" for owner, one in found.items() for name in methods(one)] + list(functions())
    unknown = [name for name in names if entry(name) is None]
    told = {name: outcome(scene, name, entry(name)) for name in names if name not in unknown}
    varied: dict[str, dict[str, str]] = {}
    for variant in VARIANTS:
        owner, _, method = variant.method.partition(".")
        one = getattr(found.get(owner), method, None)
        seen = outcome(scene, variant.method, variant.call, one) if one is not None and variant.there() else None
        if seen is not None:
            varied[f"{variant.method}({variant.shown})"] = seen
    desk.tell({"version": sdk.__version__, "methods": told, "variants": varied, "unknown": unknown})


def late(*_: object) -> None:
    raise TimeoutError(f"no answer after {PATIENCE_S} s")


if __name__ == "__main__":
    main()
