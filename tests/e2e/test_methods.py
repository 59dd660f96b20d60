"""Every method through the real stack on the tiny base: what a run asked for is what its facts say was done."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import method_specs as specs
from tests.e2e.hooks import Hook, letters
from tests.e2e.runs import Runs, span_of
from tests.stacks import StackProcess

SEED = "acme/seed"
RATE = 1e-3
GRPO_METRICS = {
    "loss", "grad_norm", "tokens", "learning_rate", "optimizer_step", "reward_mean", "reward_std",
    "completion_tokens_mean", "completion_tokens_max", "truncated_share", "kept_groups", "dropped_groups",
    "advantage_abs_mean", "clip_share", "mismatch_mean", "mismatch_max", "ratio_mean", "effective_sample_size",
}  # fmt: skip


@dataclass
class Started:
    """The runs of this module by name, all at work at once."""

    runs: Runs
    ref: dict[str, dict[str, Any]]
    ids: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, method: dict[str, Any], **more: Any) -> None:
        # the key fixes the run's seeds, so that what is sampled is the same in each session
        self.ids[name] = self.runs.start(f"acme/{name}", method, key=f"methods-{name}", **more)

    def completed(self, name: str) -> dict[str, Any]:
        return self.runs.completed(self.ids[name])

    def metrics(self, name: str) -> list[dict[str, float]]:
        self.completed(name)
        return self.runs.metrics(self.ids[name])


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    found = Hook()
    yield found
    found.close()


@pytest.fixture(scope="module")
def basic(shared_stack: StackProcess) -> Iterator[Started]:
    """One run of each method, after the policy that some of them start from."""
    with Runs(shared_stack) as runs:
        files = {
            "chats": specs.SEED_CHATS,
            "long": specs.LONG_CHATS,
            "weighed": specs.WEIGHED_CHATS,
            "user": specs.USER_CHATS,
            "pairs": specs.PAIRS,
            "questions": specs.QUESTIONS,
        }
        found = Started(runs, {name: runs.put(content) for name, content in files.items()})
        ref = found.ref
        found.start("seed", specs.seed_sft(ref["chats"]), lora={"rank": 16})
        found.start("dpo", specs.dpo(ref["pairs"]))
        found.start("sft-last", specs.sft(ref["long"], train_on="last"))
        found.start("sft-all", specs.sft(ref["long"]))
        found.start("sft-weighed", specs.sft(ref["weighed"]))
        found.start("sft-chosen", specs.sft(ref["weighed"], train_on="chosen"))
        found.start("sft-user", specs.sft(ref["user"], train_on="chosen"))
        found.completed("seed")
        found.start("dpo-on", specs.dpo(ref["pairs"]), parent=f"{SEED}@1")
        options = {
            "steps": 8, "epochs": 2, "minibatches": 2, "kl": {"estimator": "k3", "coefficient": 0.05},
            "correction": {"kind": "tis"}, "mask_overlong": True, "advantage": "leave_one_out",
            # so many, none dropped, that some completion of each minibatch ends by itself
            "prompts_per_step": 8, "group_size": 6, "drop_zero_variance": False,
        }  # fmt: skip
        found.start("grpo-2x2", specs.grpo(specs.task(ref["questions"]), **options), parent=f"{SEED}@1")
        yield found


def test_dpo_from_the_base_exports_at_its_end_and_widens_the_margin(basic: Started) -> None:
    """The loss of no margin is log 2; the last step sees the pairs of the first with a margin above 0."""
    steps = basic.metrics("dpo")
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert steps[-1]["margin"] > steps[1]["margin"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["accuracy"] == 1.0
    assert {"chosen_reward", "rejected_reward", "truncated_rows"} <= set(steps[0])
    assert [it["step"] for it in basic.runs.revisions("acme/dpo")] == [3]
    updates = basic.runs.commands(basic.ids["dpo"], "update")
    assert [(it["reference"], it["export"], it["record"]) for it in updates] == [
        (None, False, None),
        (None, False, None),
        (None, True, None),
    ]
    assert basic.runs.commands(basic.ids["dpo"], "rollout") == []


def test_dpo_on_a_parent_measures_from_it(basic: Started) -> None:
    steps = basic.metrics("dpo-on")
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["margin"] > 0
    last = basic.runs.facts(basic.ids["seed"], "policy.updated")[-1]["checkpoint"]["files"]
    for update in basic.runs.commands(basic.ids["dpo-on"], "update"):
        assert update["reference"]["files"]["adapter.safetensors"] == last["adapter.safetensors"]
        assert "state.json" in update["reference"]["files"]
    first = basic.runs.commands(basic.ids["dpo-on"], "update")[0]
    assert first["start"]["files"]["adapter.safetensors"] == last["adapter.safetensors"]
    (made,) = basic.runs.revisions("acme/dpo-on")
    assert made["parent"] == f"{SEED}@1"


def test_sft_learns_the_turns_that_it_is_told_to(basic: Started) -> None:
    """Every step sees all four chats, so that the first loss of each run is that of the base on its turns."""
    names = ("last", "weighed", "chosen", "all", "user")
    steps = {name: basic.metrics(f"sft-{name}") for name in names}
    first = {name: steps[name][0]["nll"] for name in names}
    assert first["last"] == pytest.approx(first["weighed"], rel=1e-5)
    assert first["last"] == pytest.approx(first["chosen"], rel=1e-5)
    assert abs(first["all"] - first["last"]) > 0.1
    for name in names:
        assert steps[name][0]["loss"] == pytest.approx(first[name], rel=1e-5)
        assert steps[name][0]["rows"] == 4.0
        assert steps[name][1]["nll"] < first[name]


def test_a_record_gets_four_steps_and_one_export(basic: Started) -> None:
    """2 epochs × 2 minibatches, KL to the parent, TIS, overlong masking, leave-one-out."""
    steps = basic.metrics("grpo-2x2")
    run_id = basic.ids["grpo-2x2"]
    assert len(steps) == 8
    for step in steps:
        assert set(step) >= GRPO_METRICS | {"kl"}
        assert step["kl"] >= 0
        assert step["mismatch_max"] < 1e-3
        assert step["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 0
    assert 0 < steps[0]["truncated_share"] < 1
    updates = basic.runs.commands(run_id, "update")
    assert [(it["record_step"], it["epoch"], it["minibatch"], it["export"]) for it in updates] == [
        (1, 0, 0, False), (1, 0, 1, False), (1, 1, 0, False), (1, 1, 1, True),
        (5, 0, 0, False), (5, 0, 1, False), (5, 1, 0, False), (5, 1, 1, True),
    ]  # fmt: skip
    assert (
        len({it["record"]["sha256"] for it in updates[:4]}) == len({it["record"]["sha256"] for it in updates[4:]}) == 1
    )
    assert [it["step"] for it in basic.runs.revisions("acme/grpo-2x2")] == [4, 8]
    assert [(it["step"], it["revision"]) for it in basic.runs.facts(run_id, "rollout.completed")] == [
        (1, f"{SEED}@1"),
        (5, "acme/grpo-2x2@1"),
    ]
    written = [set(it["checkpoint"]["files"]) for it in basic.runs.facts(run_id, "policy.updated")]
    assert ["old_logprobs.safetensors" in files for files in written] == [True, True, True, False] * 2


@pytest.mark.parametrize(("name", "curve"), [("dpo", "margin"), ("sft-all", "nll"), ("grpo-2x2", "kl")])
def test_a_run_of_each_method_is_looked_at(
    basic: Started, shared_stack: StackProcess, tmp_path: Path, name: str, curve: str
) -> None:
    run_id, count = basic.ids[name], basic.completed(name)["steps"]
    mint = shared_stack.mint
    shown = mint("run", "show", run_id).stdout
    assert f"completed (step {count} of {count})" in shown
    assert "loss  last" in shown
    mint("run", "plot", run_id, "--out", str(tmp_path / "run.png"))
    png = (tmp_path / "run.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000
    steps = [json.loads(line) for line in mint("run", "metrics", run_id).stdout.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, count + 1))
    assert all(step["committed"] for step in steps)
    assert any(curve in step["metrics"] for step in steps)
    wrong = mint("rollouts", run_id, "--step", str(count + 1), check=False)
    assert wrong.returncode == 2
    assert ("steps 1–8 have one" if name == "grpo-2x2" else "none of its steps has one") in wrong.stderr


def test_the_samples_of_a_step_are_its_record(basic: Started, shared_stack: StackProcess) -> None:
    run_id = basic.ids["grpo-2x2"]
    basic.completed("grpo-2x2")
    best = shared_stack.mint_json("rollouts", run_id, "--step", "7", "--best", "--limit", "48")
    assert (best["record_step"], best["revision"], best["total"]) == (5, "acme/grpo-2x2@1", 8 * 6)
    rewards = [item["reward"] for item in best["items"]]
    assert rewards == sorted(rewards, reverse=True)
    for item in best["items"]:
        assert item["reward"] == letters(item["completion"])
        same = [it["reward"] for it in best["items"] if it["group"] == item["group"]]
        assert len(same) == 6
        assert item["advantage"] == pytest.approx(item["reward"] - (sum(same) - item["reward"]) / 5, abs=1e-6)


@pytest.fixture(scope="module")
def more(basic: Started, hook: Hook) -> Started:
    ref, start = basic.ref, basic.start
    questions = ref["questions"]
    basic.completed("seed")
    optimizer = {"learning_rate": RATE, "schedule": "cosine", "warmup_steps": 2, "final_ratio": 0.1}
    start(
        "stale",
        specs.grpo(specs.task(questions), steps=6, staleness=1, optimizer=optimizer, drop_zero_variance=False),
        parent=f"{SEED}@1",
    )
    start("hooked", specs.grpo(specs.task(questions, hook.letters())), parent=f"{SEED}@1")
    plugin = {"kind": "plugin", "name": "letters", "config": {"letters": "7"}}
    start("plugged", specs.grpo(specs.task(questions, plugin)), parent=f"{SEED}@1")
    start("maths", specs.grpo(specs.task(questions, {"kind": "math_verify"})), parent=f"{SEED}@1")
    scripts: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
        "best": ((0.25, 0.75, 0.5), {"promote": "best"}),
        "target": ((0.1, 0.9), {"stop_when": {"target_score": 0.8}}),
        "stuck": ((0.5, 0.4, 0.3), {"stop_when": {"no_progress_steps": 2}}),
    }
    for name, (scores, rest) in scripts.items():
        of = specs.task(questions, hook.script(name, *scores))
        steps = 3 if name == "best" else 6
        evaluation = {"task": of, "items": 4, "max_tokens": 4}
        start(name, specs.sft(ref["chats"], steps=steps), eval_every=1, evaluation=evaluation, **rest)
    start("budget", specs.sft(ref["chats"], steps=6), stop_when={"max_tokens": 1})
    return basic


@pytest.mark.slow
def test_with_staleness_one_a_record_is_sampled_two_revisions_back(more: Started) -> None:
    """Record r with the revision after record r − 2; the rate warms up and falls along a cosine to a tenth."""
    steps = more.metrics("stale")
    completed = more.runs.facts(more.ids["stale"], "rollout.completed")
    sampled = {it["step"]: it["revision"] for it in completed}  # two are sampled at once and end in either order
    expected = [f"{SEED}@1"] * 2 + [f"acme/stale@{n}" for n in range(1, 5)]
    assert len(completed) == 6
    assert sampled == dict(enumerate(expected, start=1))
    rates = [RATE * 1 / 2, RATE] + [
        RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (k - 3) / 4))) for k in range(3, 7)
    ]
    assert [step["learning_rate"] for step in steps] == pytest.approx(rates, rel=1e-9)
    assert steps[0]["mismatch_max"] < 1e-3
    assert max(step["mismatch_max"] for step in steps[1:]) > 1e-2


@pytest.mark.slow
def test_the_best_score_is_promoted(more: Started) -> None:
    run = more.completed("best")
    scored = more.runs.facts(more.ids["best"], "revision.evaluated")
    assert [(it["revision"], it["score"]) for it in scored] == [
        ("acme/best@1", 0.25),
        ("acme/best@2", 0.75),
        ("acme/best@3", 0.5),
    ]
    assert (run["revision"], run["promoted"]) == ("acme/best@2", True)
    assert "(step 2), the best of 3 scores with 0.75" in run["outcome"]
    assert more.runs.get("policies/acme/best")["aliases"] == {"live": "acme/best@2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("target", 2, "stopped after step 2 of 6: score 0.9 reached target_score 0.8"),
        ("stuck", 3, "stopped after step 3 of 6: no evaluation in 2 steps was above the 0.5 of step 1"),
        ("budget", 1, "stopped after step 1 of 6: "),
    ],
)
def test_a_run_stops_when_it_was_told_to(more: Started, name: str, step: int, said: str) -> None:
    run = more.completed(name)
    assert run["step"] == step
    assert said in run["outcome"]
    assert run["promoted"]
    assert run["revision"] == f"acme/{name}@{step}"
    assert len(more.metrics(name)) == step


@pytest.mark.slow
def test_a_webhook_is_asked_in_batches_and_its_scores_are_the_rewards(more: Started, hook: Hook) -> None:
    more.completed("hooked")
    asked = hook.asked["/letters"]
    assert {len(items) for items in asked} == {2}
    assert sum(len(items) for items in asked) == 2 * 16
    assert {tuple(sorted(item)) for items in asked for item in items} == {("answer", "completion", "id", "prompt")}
    page = more.runs.get(f"runs/{more.ids['hooked']}/rollouts/1", limit=100)
    assert {(it["prompt_id"], it["completion"]) for it in page["items"]} <= {
        (item["id"], item["completion"]) for items in asked for item in items
    }
    assert all(it["reward"] == letters(it["completion"]) for it in page["items"])
    assert 0 < page["reward_mean"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plugged", "maths"])
def test_rewards_by_plugin_and_by_mathematics(more: Started, name: str) -> None:
    """The plugin looks for a 7 anywhere; math_verify wants 7 to be what the completion says."""
    more.completed(name)
    pages = [more.runs.get(f"runs/{more.ids[name]}/rollouts/{step}", limit=100) for step in (1, 2)]
    items = [item for page in pages for item in page["items"]]
    assert len(items) == 2 * 16
    assert {item["reward"] for item in items} == {0.0, 1.0}
    for item in items:
        if name == "plugged" or item["completion"].strip() in specs.ANSWERS:
            assert item["reward"] == float("7" in item["completion"])


@pytest.mark.slow
def test_a_puzzle_of_reasoning_gym(basic: Started) -> None:
    pytest.importorskip("reasoning_gym")
    puzzle = {"kind": "reasoning_gym", "name": "chain_sum", "size": 40, "seed": 3}
    puzzle["config"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    evaluation = {"task": puzzle, "items": 4, "max_tokens": 4}
    basic.start("puzzled", specs.grpo(puzzle), parent=f"{SEED}@1", evaluation=evaluation)
    basic.completed("puzzled")
    run_id = basic.ids["puzzled"]
    page = basic.runs.get(f"runs/{run_id}/rollouts/1", limit=100)
    assert len(page["items"]) == 16
    assert all("chain_sum-" in it["prompt_id"] and 0 <= it["reward"] <= 1 for it in page["items"])
    for it in page["items"]:
        assert (it["reward"] == 1.0) == (it["completion"].strip() == it["answer"])
    (scored,) = basic.runs.facts(run_id, "revision.evaluated")
    assert scored["scorer"].startswith("reasoning_gym:chain_sum@")


@pytest.mark.slow
def test_sampling_and_training_overlap(more: Started) -> None:
    """A whole update of one policy lies inside another's rollout."""
    for name in ("stale", "hooked", "plugged", "maths", "best", "target", "stuck"):
        more.completed(name)
    sampled = spans_of(more, "rollout.completed", ("stale", "hooked", "plugged", "maths"))
    trained = spans_of(more, "policy.updated", ("stale", "hooked", "plugged", "maths", "best", "target", "stuck"))
    inside = [
        (one, other)
        for one, begun, ended in sampled
        for other, began, over in trained
        if one != other and begun < began and over < ended
    ]
    assert inside
    assert all(begun < ended for _, begun, ended in sampled)


def spans_of(started: Started, kind: str, names: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """(run, begin, end) of the work behind each fact."""
    return [(name, *span_of(fact)) for name in names for fact in started.runs.facts(started.ids[name], kind)]
