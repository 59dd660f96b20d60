"""From a rollout record to rows: what is kept, what it weighs, and how the mismatch is measured."""

from __future__ import annotations

import math

import pytest
import torch
from mint_schemas.training import ArithmeticTask, Grpo

from services.learner.grpo import grpo_rows, mismatch
from services.learner.slots import SlotShape
from shared.errors import Fatal
from shared.rl.record import Group, RolloutRecord, Trajectory

METHOD = Grpo(kind="grpo", task=ArithmeticTask(kind="arithmetic"), steps=1)


def trajectory(tokens, reward, logprob=-1.0):
    logprobs = tuple(logprob for _ in tokens)
    return Trajectory(token_ids=tokens, logprobs=logprobs, reward=reward, finish_reason="stop", text="")


def group(name, *trajectories, prompt=(1, 5, 6)):
    return Group(prompt_id=name, prompt_ids=prompt, answer="", trajectories=trajectories)


def record(*groups, temperature=1.0):
    return RolloutRecord(
        run_id="run", step=1, policy="acme/a", base="tiny/llama", base_sha256="0" * 64, revision=None,
        adapter_sha256=None, temperature=temperature, max_tokens=16, task_sha256="0" * 64, seed=0, groups=groups,
    )  # fmt: skip


def test_rows_are_the_trajectories_of_groups_that_differ():
    rows = grpo_rows(
        record(
            group("same", trajectory((7,), 1.0), trajectory((8,), 1.0)),
            group("differs", trajectory((7, 2), 1.0), trajectory((8, 9, 9, 2), 0.0)),
        ),
        METHOD,
    )
    assert [datum.name for datum in rows.data] == ["differs", "differs"]
    assert rows.metrics["kept_groups"] == 1
    assert rows.metrics["dropped_groups"] == 1
    assert rows.metrics["reward_mean"] == 0.75
    first = rows.data[0]
    assert first.input_ids == (1, 5, 6, 7)
    assert first.targets == (5, 6, 7, 2)
    assert first.mask == (False, False, True, True)
    assert first.coefficients == pytest.approx((0.0, 0.0, 0.25, 0.25))
    assert first.inputs["advantages"][2] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert first.inputs["logprobs"] == (0.0, 0.0, -1.0, -1.0)


def test_the_denominator_counts_the_rows_that_are_left():
    """B is counted after dropping groups, so a dull group does not dilute the others."""
    alone = grpo_rows(record(group("d", trajectory((7,), 1.0), trajectory((8,), 0.0))), METHOD)
    beside = grpo_rows(
        record(
            group("d", trajectory((7,), 1.0), trajectory((8,), 0.0)),
            group("dull", *[trajectory((7,), 0.0)] * 8),
        ),
        METHOD,
    )
    assert alone.data[0].coefficients == beside.data[0].coefficients


@pytest.mark.parametrize("aggregation", ["grpo", "token", "dr_grpo"])
def test_a_record_that_teaches_nothing_leaves_no_rows(aggregation):
    method = METHOD.model_copy(update={"loss_aggregation": aggregation})
    assert grpo_rows(record(group("same", trajectory((7,), 0.0), trajectory((8,), 0.0))), method).data == []


def test_a_group_that_is_none_is_refused_by_its_prompt():
    with pytest.raises(Fatal, match="prompt one: a group of 1 has no baseline"):
        grpo_rows(record(group("one", trajectory((7,), 1.0))), METHOD)
    with pytest.raises(Fatal, match="prompt nan: reward nan is not finite"):
        grpo_rows(record(group("nan", trajectory((7,), math.nan), trajectory((7,), 1.0))), METHOD)
    torn = Trajectory(token_ids=(1, 2), logprobs=(-1.0,), reward=1.0, finish_reason="stop", text="")
    with pytest.raises(Fatal, match="prompt torn, trajectory 1: 2 tokens but 1 logprobs"):
        grpo_rows(record(group("torn", trajectory((7,), 1.0), torn)), METHOD)


def test_the_mismatch_metrics_are_those_of_the_formula():
    rows = grpo_rows(record(group("d", trajectory((7,), 1.0, -1.0), trajectory((8,), 0.0, -2.0))), METHOD)
    found = mismatch(rows.data, [[0.0, 0.0, -1.0], [0.0, 0.0, -1.5]])
    weights = [1.0, math.exp(0.5)]
    assert found["mismatch_mean"] == pytest.approx(0.25)
    assert found["mismatch_max"] == pytest.approx(0.5)
    assert found["ratio_mean"] == pytest.approx(sum(weights) / 2)
    assert found["effective_sample_size"] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))


def test_at_temperature_0_6_the_mean_ratio_is_one(rig):
    """trl#4159, prime-rl#697: tokens sampled by Transformers at T = 0.6 → mean ratio 1 within 0.02."""
    bench = rig()
    slot = bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, ("q_proj", "v_proj")))
    with torch.no_grad():
        for name in sorted(slot.parameters):
            slot.parameters[name].add_(0.02)
    module = bench.slots.activate(slot)
    torch.manual_seed(3)
    out = module.generate(
        torch.tensor([[1, 50, 60, 70]]).repeat(16, 1), attention_mask=torch.ones(16, 4, dtype=torch.long),
        do_sample=True, temperature=0.6, top_k=0, top_p=1.0, max_new_tokens=12, eos_token_id=None,
        pad_token_id=2, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    q = torch.log_softmax(torch.stack(out.logits, dim=1).double() / 0.6, dim=-1)
    completions = out.sequences[:, 4:]
    chosen = q.gather(2, completions[:, :, None])[:, :, 0]
    trajectories = [
        Trajectory(token_ids=tuple(t), logprobs=tuple(p), reward=float(i % 2), finish_reason="length", text="")
        for i, (t, p) in enumerate(zip(completions.tolist(), chosen.tolist(), strict=True))
    ]
    rows = grpo_rows(record(group("p", *trajectories, prompt=(1, 50, 60, 70)), temperature=0.6), METHOD)
    result = bench.trainer.forward_backward(slot, rows.data, rows.call, lambda: None)
    found = mismatch(rows.data, result.logprobs)
    assert found["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert found["mismatch_max"] < 1e-3
    assert found["effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
