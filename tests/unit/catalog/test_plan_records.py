"""Several optimizer steps per record, rollouts that lag behind, scores on the way: the plan, walked in every
order in which commands may end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from services.catalog import goal as numbering
from services.catalog import plan
from services.catalog.goal import Use
from services.catalog.plan import Goal, Next, Situation, next_action

READY = {f"p@{step}": 1 for step in range(100)}


def _grpo(records: int, epochs: int = 1, minibatches: int = 1, **other: object) -> Goal:
    per = epochs * minibatches
    return replace(Goal("grpo", records * per, minibatches=minibatches, steps_per_record=per), **other)  # type: ignore[arg-type]


def test_steps_are_numbered_by_record_epoch_and_minibatch() -> None:
    goal = _grpo(2, epochs=2, minibatches=3)
    assert [numbering.use_of(goal, step) for step in range(1, 13)] == [
        Use(1, 1, 0, 0), Use(1, 1, 0, 1), Use(1, 1, 0, 2), Use(1, 1, 1, 0), Use(1, 1, 1, 1), Use(1, 1, 1, 2),
        Use(2, 7, 0, 0), Use(2, 7, 0, 1), Use(2, 7, 0, 2), Use(2, 7, 1, 0), Use(2, 7, 1, 1), Use(2, 7, 1, 2),
    ]  # fmt: skip
    assert [step for step in range(1, 13) if plan.exports_step(goal, step)] == [6, 12]


@pytest.mark.parametrize(
    ("staleness", "expected"), [(0, [0, 4, 8, 12, 16]), (1, [0, 0, 4, 8, 12]), (2, [0, 0, 0, 4, 8])]
)
def test_a_record_is_sampled_after_the_record_that_its_staleness_says(staleness: int, expected: list[int]) -> None:
    """The revision after record r − 1 − s; what the run starts from for r ≤ s + 1."""
    goal = _grpo(5, epochs=2, minibatches=2, staleness=staleness)
    assert [numbering.sampled_after(goal, record) for record in range(1, 6)] == expected


@pytest.mark.parametrize(
    ("goal", "exported"),
    [
        (Goal("sft", 7), [7]),
        (Goal("sft", 7, save_every=3), [3, 6, 7]),
        (Goal("dpo", 7, eval_every=2), [2, 4, 6, 7]),
        (Goal("sft", 7, save_every=3, eval_every=2), [2, 3, 4, 6, 7]),
        (_grpo(4, eval_every=2), [1, 2, 3, 4]),
    ],
)
def test_what_is_scored_is_exported(goal: Goal, exported: list[int]) -> None:
    assert [step for step in range(1, goal.steps + 1) if plan.exports_step(goal, step)] == exported


def test_a_token_budget_can_end_a_run_at_any_step_so_each_may_be_exported() -> None:
    assert next_action(Situation(Goal("sft", 7, max_tokens=100))).action == plan.Update(1, export=True)
    assert not plan.exports_step(Goal("sft", 7, max_tokens=100), 1)


STALE = Situation(_grpo(9, staleness=2), ready=READY)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (STALE, plan.Rollout(1, None)),
        (replace(STALE, records={1: "open"}), plan.Rollout(2, None)),
        (replace(STALE, records={1: "open", 2: "open"}), plan.Rollout(3, None)),
        (replace(STALE, records={1: "open", 2: "open", 3: "open"}), plan.Wait()),
        (replace(STALE, records={1: "open", 2: "committed", 3: "open"}), plan.Wait()),
        (replace(STALE, records={1: "committed", 2: "open", 3: "open"}), plan.Update(1, export=True)),
        (replace(STALE, records={1: "committed", 2: "open", 3: "open"}, working="update"), plan.Wait()),
        (replace(STALE, done=1, records={2: "committed", 3: "open"}), plan.Export(1)),
        (replace(STALE, done=1, records={2: "committed", 3: "open"}, working="export"), plan.Wait()),
        (replace(STALE, done=1, records={2: "committed", 3: "open"}, exported=True), plan.Register(1)),
        (
            replace(STALE, done=1, records={2: "committed", 3: "open"}, exported=True, revisions={1: "p@1"}),
            plan.Update(2, export=True),
        ),
        (
            replace(STALE, done=1, records={2: "committed", 3: "open"}, revisions={1: "p@1"}, working="update"),
            plan.Rollout(4, "p@1"),
        ),
        (
            replace(
                STALE, done=1, records={2: "committed", 3: "open"}, revisions={1: "p@1"}, working="update", ready={}
            ),
            plan.AwaitReady("p@1"),
        ),
    ],
)
def test_rollouts_are_asked_for_ahead(now: Situation, expected: plan.Action) -> None:
    assert next_action(now) == Next("running", expected)


def test_a_revision_that_a_later_rollout_waits_for_too_long_fails_the_run() -> None:
    now = replace(STALE, done=1, records={2: "committed", 3: "open"}, revisions={1: "p@1"}, working="update", ready={})
    action = next_action(replace(now, waiting_for="p@1", waited_s=901)).action
    assert isinstance(action, plan.Fail)
    assert "p@1 was ready on 0 of 1" in action.reason


SCORED = Situation(Goal("sft", 6, evaluates=True, eval_every=2, promote_to="live"), ready=READY)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (replace(SCORED, done=2), Next("running", plan.Export(2))),
        (replace(SCORED, done=2, revisions={2: "p@1"}), Next("running", plan.Evaluate(2, "p@1"))),
        (replace(SCORED, done=2, revisions={2: "p@1"}, ready={}), Next("running", plan.AwaitReady("p@1"))),
        (replace(SCORED, done=2, revisions={2: "p@1"}, working="evaluation"), Next("running", plan.Wait())),
        (replace(SCORED, done=2, revisions={2: "p@1"}, scores={2: 0.1}), Next("running", plan.Update(3, False))),
        (
            replace(SCORED, done=6, revisions={6: "p@3"}, scores={2: 0.9, 4: 0.1}),
            Next("evaluating", plan.Evaluate("last", "p@3")),
        ),
        (
            replace(SCORED, done=6, revisions={6: "p@3"}, scores={2: 0.9, 4: 0.1, 6: 0.2}),
            Next("promoting", plan.Promote("p@3", "live")),
        ),
    ],
)
def test_revisions_are_scored_on_the_way(now: Situation, expected: Next) -> None:
    assert next_action(now) == expected


@dataclass
class Walk:
    """A run, and who works for it: each command that is open may end at any time."""

    goal: Goal
    parent: str | None
    score: Callable[[int], float]
    choose: random.Random
    tokens: int = 0
    open: list[plan.Action] = field(default_factory=list)
    log: list[plan.Action] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    beside: int = 0

    def __post_init__(self) -> None:
        self.now = Situation(self.goal, parent=self.parent)

    def run(self) -> plan.Action:
        for _ in range(2000):
            following = next_action(self.now)
            assert next_action(self.now) == following
            self.states.append(following.state)
            action = following.action
            match action:
                case plan.Promote() | plan.Complete() | plan.Fail():
                    return action
                case plan.Wait():
                    self._finish_one()
                case plan.AwaitReady(revision):
                    if self.open and self.choose.random() < 0.5:
                        self._finish_one()
                    else:
                        self.now = replace(self.now, ready={**self.now.ready, revision: 1})
                case plan.Register(step):
                    self.now = replace(self.now, revisions={**self.now.revisions, step: f"p@{step}"})
                case plan.DropRollouts():
                    self.open = [command for command in self.open if not isinstance(command, plan.Rollout)]
                    self.now = replace(self.now, records={r: s for r, s in self.now.records.items() if s != "open"})
                case _:
                    self._issue(action)
        raise AssertionError(f"{self.goal} does not end")

    def _issue(self, action: plan.Action) -> None:
        self.log.append(action)
        self.open.append(action)
        assert len(self.open) <= 1 + self.goal.staleness
        assert sum(not isinstance(command, plan.Rollout) for command in self.open) <= 1
        match action:
            case plan.Rollout(step, revision):
                assert revision is None or self.now.ready[revision]
                record = numbering.record_at(self.goal, step)
                self.now = replace(self.now, records={**self.now.records, record: "open"})
            case plan.Update():
                self.now = replace(self.now, working="update")
            case plan.Export():
                self.now = replace(self.now, working="export")
            case plan.Evaluate(revision=revision):
                assert revision is None or self.now.ready[revision]
                self.now = replace(self.now, working="evaluation")
        if self.now.working == "update":
            self.beside = max(self.beside, self.now.open_rollouts)

    def _finish_one(self) -> None:
        assert self.open, "waits for nothing"
        command = self.open.pop(self.choose.randrange(len(self.open)))
        now = self.now
        match command:
            case plan.Rollout(step):
                record = numbering.record_at(self.goal, step)
                self.now = replace(now, records={**now.records, record: "committed"}, tokens=now.tokens + self.tokens)
            case plan.Update(step):
                use = numbering.use_of(self.goal, step)
                assert not self.goal.samples or now.records[use.record] == "committed"
                kept = {r: s for r, s in now.records.items() if r >= numbering.use_of(self.goal, step + 1).record}
                self.now = replace(now, working=None, done=step, exported=False, records=kept)
                self.now = replace(self.now, tokens=now.tokens + self.tokens)
            case plan.Export():
                self.now = replace(now, working=None, exported=True)
            case plan.Evaluate(target="parent" | "base"):
                self.now = replace(now, working=None, reference_score=0.4)
            case plan.Evaluate():
                assert now.done not in now.scores, "scored twice"
                self.now = replace(now, working=None, scores={**now.scores, now.done: self.score(now.done)})

    def rollouts(self) -> dict[int, str | None]:
        return {action.step: action.revision for action in self.log if isinstance(action, plan.Rollout)}


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
@pytest.mark.parametrize("parent", [None, "p@0"])
def test_in_whatever_order_commands_end_each_record_is_sampled_with_the_same_revision(
    staleness: int, parent: str | None
) -> None:
    for epochs, minibatches, eval_records, seed in itertools.product((1, 2), (1, 3), (None, 1, 2), range(6)):
        per = epochs * minibatches
        every = None if eval_records is None else eval_records * per
        goal = _grpo(5, epochs, minibatches, staleness=staleness, eval_every=every, evaluates=True, promote_to="live")
        walk = Walk(goal, parent, lambda step: 0.5, random.Random(seed))
        assert walk.run() == plan.Promote(f"p@{goal.steps}", "live")
        expected = {}
        for record in range(1, 6):
            lag = max(0, record - 1 - staleness)
            expected[(record - 1) * per + 1] = f"p@{lag * per}" if lag else parent
        assert walk.rollouts() == expected
        updates = [action for action in walk.log if isinstance(action, plan.Update)]
        assert [action.step for action in updates] == list(range(1, goal.steps + 1))
        assert [action.step for action in updates if action.export] == list(range(per, goal.steps + 1, per))
        scored = [action.target for action in walk.log if isinstance(action, plan.Evaluate)]
        assert scored == [*range(every or goal.steps, goal.steps, every or goal.steps), "last"]
        assert walk.states == sorted(walk.states, key=["running", "evaluating", "promoting"].index)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_as_many_rollouts_as_the_staleness_are_open_beside_an_update(staleness: int) -> None:
    walks = [Walk(_grpo(6, staleness=staleness), None, lambda step: 0.0, random.Random(seed)) for seed in range(10)]
    for walk in walks:
        walk.run()
    assert max(walk.beside for walk in walks) == staleness


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_token_budget_ends_every_walk_at_a_step_that_becomes_a_revision(staleness: int) -> None:
    for budget, epochs, seed in itertools.product((1, 25, 70), (1, 2), range(8)):
        goal = _grpo(20, epochs, staleness=staleness, max_tokens=budget, promote_to="live", evaluates=True)
        walk = Walk(goal, None, lambda step: 0.5, random.Random(seed), tokens=10)
        action = walk.run()
        assert isinstance(action, plan.Promote)
        assert 1 <= walk.now.done < goal.steps
        assert action.revision == f"p@{walk.now.done}"
        assert f"stopped after step {walk.now.done} of {goal.steps}: {walk.now.tokens} tokens" in action.remark
        assert walk.open == []
        assert walk.now.tokens >= budget
        assert walk.states == sorted(walk.states, key=["running", "evaluating", "promoting"].index)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_score_that_is_reached_ends_every_walk_at_the_step_that_reached_it(staleness: int) -> None:
    for method, seed in itertools.product(("sft", "grpo"), range(6)):
        goal = replace(
            Goal("sft", 12, evaluates=True, eval_every=2, promote_to="live", target_score=0.5),
            method=method, staleness=staleness,
        )  # fmt: skip
        walk = Walk(goal, "p@0", lambda step: step / 12, random.Random(seed))
        assert walk.run() == plan.Promote(
            "p@6", "live", "; stopped after step 6 of 12: score 0.5 reached target_score 0.5"
        )
        scored = [action.target for action in walk.log if isinstance(action, plan.Evaluate)]
        assert scored == [2, 4, 6], "the last revision was scored on the way"
