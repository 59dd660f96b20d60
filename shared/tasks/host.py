"""A process of its own for work whose input others wrote; run as a script, the other side is `hosted.py`.

A short pattern can ask for all memory when it is compiled, and for years when it is matched; so can an
expression that is to be simplified, or a puzzle that is to be generated. Here both are bounded by the
kernel: address space by a limit, CPU time by a timer whose signal ends the process.

In: lines of JSON, first what to be, then requests. Out: a line of JSON for each. Ends with its input.
Invariant: nothing that the work prints gets among the answers.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
Work = Callable[[Any], Answer]

MIB = 1024**2
MEMORY_MIB = {"pattern": 512, "math": 2048, "gym": 2048}
OPENING_CPU_S = {"pattern": 1.0, "math": 15.0, "gym": 15.0}
REQUEST_CPU_S = {"pattern": 1.0, "math": 2.0, "gym": 10.0}


class Refused(Exception):
    """The opening or the request asks for something that there is not; the message says what there is."""


def pattern_host(opening: Answer) -> tuple[Answer, Work]:
    compiled = re.compile(opening["pattern"])

    def search(text: str) -> Answer:
        found = compiled.search(text)
        return {"matched": found is not None, "group": found.group(1) if found and compiled.groups else None}

    return {"groups": compiled.groups}, search


def math_host(opening: Answer) -> tuple[Answer, Work]:
    from math_verify import parse, verify

    # The library's own time-out sets signals, which work in a main thread alone; the timer here is enough.
    expressions = functools.partial(parse, parsing_timeout=None)

    @functools.lru_cache(maxsize=1024)
    def expected(answer: str) -> Any:
        plain = re.fullmatch(r"\s*([-+]?\d*\.?\d+)[eE]([-+]?\d+)\s*", answer)
        text = rf"{plain[1]}\times10^{{{plain[2]}}}" if plain else answer
        return expressions(text if "$" in text or r"\boxed" in text else f"${text}$")

    def compare(request: Answer) -> Answer:
        gold = expected(request["answer"])
        if not gold:
            return {"unknown": True}
        # An answer alone is compared with some number, to see that it can be compared at all.
        found = expressions(request.get("completion", "7"))
        return {"score": float(verify(gold, found, timeout_seconds=None))}

    return {}, compare


def gym_host(opening: Answer) -> tuple[Answer, Work]:
    name, size, seed = opening["name"], opening["size"], opening["seed"]
    create = _gym_generator(name, opening["config"])

    @functools.lru_cache(maxsize=64)
    def dataset(attempt: int) -> Any:
        return create(size=size, seed=(seed + attempt * opening["stride"]) % 2**31)

    @functools.lru_cache(maxsize=512)
    def entry(attempt: int, place: int) -> Answer:
        found: Answer = dataset(attempt)[place]
        return found

    def work(request: Answer) -> Answer:
        found = entry(*request["entry"])
        if "score" not in request:
            answer = found["answer"]
            return {"question": str(found["question"]), "answer": "" if answer is None else str(answer)}
        try:
            return {"score": float(dataset(request["entry"][0]).score_answer(request["score"], found))}
        except Exception as error:
            return {"unreadable": f"{type(error).__name__}: {error}"[:300]}

    try:
        return work({"entry": [0, 0]}), work
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(f"the generator {name} refuses this config: {type(error).__name__}: {error}"[:500]) from error


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


HOSTS: dict[str, Callable[[Answer], tuple[Answer, Work]]] = {
    "pattern": pattern_host,
    "math": math_host,
    "gym": gym_host,
}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    opening = json.loads(sys.stdin.readline())
    kind = opening["kind"]
    limit = MEMORY_MIB[kind] * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work: Work | None = None
    request = opening
    while True:
        signal.setitimer(signal.ITIMER_PROF, REQUEST_CPU_S[kind] if work else OPENING_CPU_S[kind])
        try:
            if work is None:
                answer, work = HOSTS[kind](opening)
            else:
                answer = work(request)
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_MIB[kind]} MiB", "over": True}
        except Exception as error:
            told = isinstance(error, (re.error, RecursionError, OverflowError, Refused))
            answer = {"error": str(error) if told else f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if work is None or not line:
            return
        request = json.loads(line)


if __name__ == "__main__":
    main()
