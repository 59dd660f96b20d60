"""A process of its own for work whose input others wrote; run as a script, the other side is `hosted.py`.

A short pattern can ask for all memory when it is compiled, and for years when it is matched; so can an
expression that is to be simplified, or a puzzle that is to be generated. Here both are bounded by the
kernel: address space by a limit, CPU time by a timer whose signal ends the process. Some verifiers evaluate
a completion as a program, so each is read in a fork of this process, which is prepared once (`confine.py`).

In: lines of JSON, first what to be, then requests. Out: a line of JSON for each. Ends with its input, and
with the process that started it. Invariants: nothing that the work prints gets among the answers; what a
completion changes is gone with its fork, of which only a score between 0 and 1 is believed.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Answer = dict[str, Any]

MIB = 1024**2
MEMORY_MIB = {"pattern": 512, "math": 2048, "gym": 2048}
OPENING_CPU_S = {"pattern": 1.0, "math": 15.0, "gym": 15.0}
REQUEST_CPU_S = {"pattern": 1.0, "math": 2.0, "gym": 10.0}
WATCH_MS = 1000


class Refused(Exception):
    """The opening or the request asks for something that there is not; the message says what there is."""


class Work(NamedTuple):
    """`opened` answers the opening. `here` answers a request, or with None: `apart` is to do it in a fork."""

    opened: Answer
    here: Callable[[Any], Answer | None]
    apart: Callable[[Any], Answer]


def pattern_host(opening: Answer) -> Work:
    compiled = re.compile(opening["pattern"])

    def search(text: str) -> Answer:
        found = compiled.search(text)
        return {"matched": found is not None, "group": found.group(1) if found and compiled.groups else None}

    return Work({"groups": compiled.groups}, search, search)


def math_host(opening: Answer) -> Work:
    from math_verify import parse, verify

    # The library's own time-out sets signals, which work in a main thread alone; the timer here is enough.
    expressions = functools.partial(parse, parsing_timeout=None)

    def compare(request: Answer) -> Answer:
        plain = re.fullmatch(r"\s*([-+]?\d*\.?\d+)[eE]([-+]?\d+)\s*", request["answer"])
        text = rf"{plain[1]}\times10^{{{plain[2]}}}" if plain else request["answer"]
        gold = expressions(text if "$" in text or r"\boxed" in text else f"${text}$")
        if not gold:
            return {"unknown": True}
        # An answer alone is compared with some number, to see that it can be compared at all.
        found = expressions(request.get("completion", "7"))
        return {"score": float(verify(gold, found, timeout_seconds=None))}

    return Work({}, lambda request: None, compare)


def _warm_math() -> None:
    """What the library imports and builds on first use is then there in every fork."""
    compare = math_host({}).apart
    for answer, completion in (("1/2", r"$\frac{1}{2}$"), (r"\{1,x\}", r"\boxed{[0,x)}"), ("5", "75%, no: 5 cm")):
        compare({"answer": answer, "completion": completion})


def gym_host(opening: Answer) -> Work:
    name, size, seed = opening["name"], opening["size"], opening["seed"]
    create = _gym_generator(name, opening["config"])

    @functools.lru_cache(maxsize=64)
    def dataset(attempt: int) -> Any:
        return create(size=size, seed=(seed + attempt * opening["stride"]) % 2**31)

    @functools.lru_cache(maxsize=512)
    def entry(attempt: int, place: int) -> Answer:
        found: Answer = dataset(attempt)[place]
        return found

    def here(request: Answer) -> Answer | None:
        found = entry(*request["entry"])
        if "score" in request:
            return None
        answer = found["answer"]
        return {"question": str(found["question"]), "answer": "" if answer is None else str(answer)}

    def apart(request: Answer) -> Answer:
        found = entry(*request["entry"])
        return {"score": float(dataset(request["entry"][0]).score_answer(request["score"], found))}

    try:
        here({"entry": [0, 0]})
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(f"the generator {name} refuses this config: {type(error).__name__}: {error}"[:500]) from error
    return Work({}, here, apart)


def _gym_generator(name: str, config: Answer) -> Callable[..., Any]:
    """Raises Refused for a name or a key that is unknown, with what is known."""
    import dataclasses

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name == "composite":
        raise Refused("composite mixes other generators by a nested configuration; name one of the others")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 5, 0.5) or sorted(DATASETS)
        raise Refused(f"there is no generator {name!r}; near are {', '.join(near)}")
    fields = {f.name: f for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("size", "seed")}
    for key in config:
        if key not in fields:
            own = "; size and seed are fields of the task" if key in ("size", "seed") else ""
            raise Refused(f"the generator {name} has no setting {key!r}; it has {', '.join(fields) or 'none'}{own}")
    # JSON has no tuples; a generator whose default is one may compare or hash it.
    tuples = {
        key for key, value in config.items() if isinstance(value, list) and isinstance(fields[key].default, tuple)
    }
    typed = {key: tuple(value) if key in tuples else value for key, value in config.items()}
    return functools.partial(reasoning_gym.create_dataset, name, **typed)


def _beside(name: str) -> Any:
    """A module of this folder, which is not on the path here, nor is the package that it is of."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOSTS: dict[str, Callable[[Answer], Work]] = {"pattern": pattern_host, "math": math_host, "gym": gym_host}


def watcher() -> Callable[[int], None]:
    """A wait for a file to be readable, which ends this process when the one that started it ends."""
    parent = os.getppid()

    def watch(number: int) -> None:
        ready = select.poll()
        ready.register(0, 0)
        ready.register(number, select.POLLIN)
        while True:
            found = dict(ready.poll(WATCH_MS))
            if os.getppid() != parent or (number != 0 and 0 in found):
                os._exit(0)
            if number in found:
                return

    return watch


def _attempt(kind: str, cpu_s: float, work: Callable[[], Any]) -> Any:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return work()
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_MIB[kind]} MiB", "over": True}
    except Exception as error:
        told = isinstance(error, (re.error, RecursionError, OverflowError, Refused))
        return {"error": str(error) if told else f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _opened(opening: Answer, watch: Callable[[int], None]) -> tuple[Work, Any]:
    """Libraries first; then, confined, what a tenant chose: a generator's config may reach an evaluator too."""
    kind = opening["kind"]
    if kind == "pattern":
        return pattern_host(opening), None
    forks = _beside("forks").Forks(_beside("confine"), REQUEST_CPU_S[kind], MEMORY_MIB[kind], watch)
    if kind == "gym":
        import reasoning_gym  # noqa: F401

        _beside("guarded").guard_evaluators()
    else:
        _warm_math()
    forks.confine()
    return HOSTS[kind](opening), forks


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = watcher()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    opening = json.loads(sys.stdin.readline())
    kind = opening["kind"]
    limit = MEMORY_MIB[kind] * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    opened = _attempt(kind, OPENING_CPU_S[kind], lambda: _opened(opening, watch))
    answer = opened if isinstance(opened, dict) else opened[0].opened
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if isinstance(opened, dict):
            return
        watch(0)
        line = sys.stdin.readline()
        if not line:
            return
        (work, forks), request = opened, json.loads(line)
        answer = _attempt(kind, REQUEST_CPU_S[kind], functools.partial(work.here, request))
        if answer is None:
            answer = forks.score(work.apart, request)


if __name__ == "__main__":
    main()
