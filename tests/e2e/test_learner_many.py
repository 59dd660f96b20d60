"""Many policies on one learner: fair, apart from each other, and the same bytes however few slots there are."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import method_specs as specs
from tests.e2e.conftest import FP32
from tests.e2e.runs import Runs, span_of
from tests.stacks import StackProcess, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEADY = ("sft-small", "sft-large", "dpo-small", "dpo-large")
"""Policies whose next step can follow at once: none of their steps but the last becomes a revision."""

SAMPLING = ("grpo", "grpo-2x2")
BAD = ("too-long", "undefined")
STEPS = 8
BOUND = 3
"""How many updates of another policy may be committed between two of one. A policy has one update open, and the
base is given to steps in the order in which they ask for it, so that one step of each other policy is made
before this one's. One more may be committed while this one's command is still on its way to the learner, and
one while its files are on their way to the store, since each other policy makes such a round trip too."""


@dataclass
class Many:
    """What the same requests gave on one stack."""

    adapters: dict[str, str] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    updated: list[str] = field(default_factory=list)
    spans: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, bases: Path, rewards: dict[str, str]) -> Many:
    with sliced(tmp_path_factory.mktemp("roomy") / "data", bases, rewards, slots=8) as stack:
        return train_all(stack)


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory, bases: Path, rewards: dict[str, str]) -> Many:
    with sliced(tmp_path_factory.mktemp("cramped") / "data", bases, rewards, slots=2) as stack:
        return train_all(stack)


@contextmanager
def sliced(data: Path, bases: Path, rewards: dict[str, str], slots: int) -> Iterator[StackProcess]:
    learner = {"MINT_LEARNER_SCHEDULE": "sliced", "MINT_LEARNER_SLOTS": str(slots)}
    stack = StackProcess(data, "transformers", bases, {**FP32, **rewards, **learner})
    try:
        yield stack.up()
    finally:
        stack.down()


def train_all(stack: StackProcess) -> Many:
    """A parent first, then all at once."""
    found = Many()
    with Runs(stack) as runs:
        chats, pairs, questions = (runs.put(it) for it in (specs.SEED_CHATS, specs.PAIRS, specs.QUESTIONS))
        runs.completed(runs.start("acme/parent", specs.seed_sft(chats), key="parent", lora={"rank": 4, "alpha": 8.0}))
        long = runs.put(
            lines(*({"prompt": "words " * 2000 if n == 5 else f"say {n}", "answer": "7"} for n in range(8)))
        )
        undefined = {"kind": "plugin", "name": "undefined"}
        of = specs.task(questions)
        record = {"epochs": 2, "minibatches": 2, "kl": {"estimator": "k3", "coefficient": 0.05}}
        asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "sft-small": (specs.sft(chats, steps=STEPS), {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj"]}),
            "sft-large": (specs.sft(chats, steps=STEPS, train_on="last"), {"rank": 16, "alpha": 16.0}),
            "dpo-small": (specs.dpo(pairs, steps=STEPS), {"rank": 8, "target_modules": ["v_proj", "o_proj"]}),
            "dpo-large": (specs.dpo(pairs, steps=STEPS), {"rank": 4, "alpha": 8.0}),
            "grpo": (specs.grpo(of, steps=3), {"rank": 4, "alpha": 8.0}),
            "grpo-2x2": (specs.grpo(of, steps=8, **record), {"rank": 4, "alpha": 8.0}),
            "too-long": (specs.grpo(specs.task(long, held_out=0.0), prompts_per_step=8), {"rank": 32}),
            "undefined": (specs.grpo(specs.task(questions, undefined)), {"rank": 1}),
        }
        on_parent = ("dpo-large", "grpo", "grpo-2x2")
        ids = {
            name: runs.start(
                f"acme/{name}", method, key=name, lora=lora, parent="acme/parent@1" if name in on_parent else None
            )
            for name, (method, lora) in asked.items()
        }
        found.ended = {name: runs.ended(run_id) for name, run_id in ids.items()}
        for name, run_id in ids.items():
            kinds = ("rollout.completed", "policy.updated")
            found.spans[name] = {kind: [span_of(fact) for fact in runs.facts(run_id, kind)] for kind in kinds}
            found.adapters |= {it["revision"]: it["adapter_sha256"] for it in runs.revisions(f"acme/{name}")}
        names = {run_id: name for name, run_id in ids.items()}
        found.updated = [names[run_id] for run_id in updates_in_order(stack) if run_id in names]
    return found


def updates_in_order(stack: StackProcess) -> list[str]:
    """The run of each policy.updated of the stack, in the order of their commits."""
    with sqlite3.connect(f"file:{stack.data / 'catalog.db'}?mode=ro", uri=True) as db:
        query = "SELECT body FROM journal WHERE type = 'mint.v1.policy.updated' ORDER BY seq"
        rows = db.execute(query).fetchall()
    db.close()
    return [json.loads(body)["run_id"] for (body,) in rows]


def test_all_complete_beside_two_that_cannot(roomy: Many) -> None:
    assert {name: roomy.ended[name]["state"] for name in (*STEADY, *SAMPLING)} == dict.fromkeys(
        (*STEADY, *SAMPLING), "completed"
    ), {name: run["outcome"] for name, run in roomy.ended.items()}
    assert {roomy.ended[name]["state"] for name in BAD} == {"failed"}
    assert "line-6" in roomy.ended["too-long"]["outcome"]
    assert "1024" in roomy.ended["too-long"]["outcome"]
    assert "nan on prompt line-" in roomy.ended["undefined"]["outcome"]
    assert {roomy.ended[name]["step"] for name in BAD} == {0}


def test_no_policy_waits_for_more_than_a_bounded_number_of_others_steps(roomy: Many) -> None:
    for name in STEADY:
        places = [place for place, other in enumerate(roomy.updated) if other == name]
        assert len(places) == STEPS
        between = [roomy.updated[a + 1 : b] for a, b in pairwise(places)]
        worst = {other: max(part.count(other) for part in between) for other in (*STEADY, *SAMPLING) if other != name}
        assert max(worst.values()) <= BOUND, (name, worst, roomy.updated)


def test_they_take_turns(roomy: Many) -> None:
    """None of those that were started together is over before another has begun."""
    first = {name: roomy.updated.index(name) for name in STEADY}
    last = {name: len(roomy.updated) - 1 - roomy.updated[::-1].index(name) for name in STEADY}
    assert max(first.values()) < min(last.values())


def test_two_slots_give_the_bytes_of_eight(roomy: Many, cramped: Many) -> None:
    """With two slots every step of a policy evicts another's, and one that has a reference takes both."""
    assert {name: run["state"] for name, run in cramped.ended.items()} == {
        name: run["state"] for name, run in roomy.ended.items()
    }
    assert len(cramped.adapters) == 4 + 3 + 2
    assert cramped.adapters == roomy.adapters
    last = {revision.split("@")[0]: sha256 for revision, sha256 in cramped.adapters.items()}
    assert len(set(last.values())) == len(last) == 6


def test_a_policy_trains_while_another_samples(roomy: Many) -> None:
    """A whole update of one lies inside a rollout of the other."""
    inside = [
        (one, other)
        for one in SAMPLING
        for begun, ended in roomy.spans[one]["rollout.completed"]
        for other in STEADY
        for began, over in roomy.spans[other]["policy.updated"]
        if begun < began and over < ended
    ]
    assert inside
