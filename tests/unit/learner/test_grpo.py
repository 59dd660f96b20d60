"""From a rollout record to rows: what takes part, what it weighs, how it is dealt, and what is reported."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from mint_schemas.training import ArithmeticTask, Grpo, IcePop, KlPenalty, Tis

from services.learner.grpo import grpo_config, grpo_rows
from services.learner.losses import LOSSES, loss_named
from services.learner.optimizer import AdamParams
from services.learner.slots import SlotShape
from shared.errors import Fatal
from shared.rl.record import Group, RolloutRecord, Trajectory

TASK = ArithmeticTask(kind="arithmetic")


def method(**settings):
    return Grpo(**{"kind": "grpo", "task": TASK, "steps": 12, **settings})


METHOD = method()


def trajectory(tokens, reward, logprob=-1.0, finish_reason="stop"):
    logprobs = tuple(logprob for _ in tokens)
    return Trajectory(token_ids=tokens, logprobs=logprobs, reward=reward, finish_reason=finish_reason, text="")


def group(name, *trajectories, prompt=(1, 5, 6)):
    return Group(prompt_id=name, prompt_ids=prompt, answer="", trajectories=trajectories)


def record(*groups, temperature=1.0, step=1):
    return RolloutRecord(
        run_id="run", step=step, policy="acme/a", base="tiny/llama", base_sha256="0" * 64, revision=None,
        adapter_sha256=None, temperature=temperature, max_tokens=16, task_sha256="0" * 64, seed=0, groups=groups,
    )  # fmt: skip


def pair(name, *lengths):
    """A group whose trajectories have these lengths and the rewards 1, 0, 1, …"""
    return group(name, *(trajectory((7,) * n, float(i % 2 == 0)) for i, n in enumerate(lengths)))


def test_rows_are_the_trajectories_of_groups_that_differ():
    rows = grpo_rows(
        record(
            group("same", trajectory((7,), 1.0), trajectory((8,), 1.0)),
            group("differs", trajectory((7, 2), 1.0), trajectory((8, 9, 9, 2), 0.0)),
        ),
        METHOD,
    )
    assert [d.name for d in rows.data] == ["differs, group 1, trajectory 0", "differs, group 1, trajectory 1"]
    first = rows.data[0]
    assert first.input_ids == (1, 5, 6, 7)
    assert first.targets == (5, 6, 7, 2)
    assert first.mask == (False, False, True, True)
    assert first.coefficients == pytest.approx((0.0, 0.0, 0.25, 0.25))
    assert first.inputs["advantages"][2] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert first.inputs["logprobs"] == (0.0, 0.0, -1.0, -1.0)
    assert not rows.record
    assert not rows.reference


def test_a_row_has_a_name_of_its_own_where_a_prompt_is_asked_twice():
    rows = grpo_rows(record(pair("p", 1, 1), pair("p", 1, 1)), METHOD)
    assert len({datum.name for datum in rows.data}) == 4


def test_what_is_known_of_a_record():
    rows = grpo_rows(
        record(
            group("same", trajectory((7,), 1.0, finish_reason="length"), trajectory((8,), 1.0)),
            group("differs", trajectory((7, 2), 1.0), trajectory((8, 9, 9, 2), 0.0)),
        ),
        METHOD,
    )
    assert rows.metrics == pytest.approx(
        {
            "reward_mean": 0.75,
            "reward_std": statistics.stdev([1.0, 1.0, 1.0, 0.0]),
            "completion_tokens_mean": 2.0,
            "completion_tokens_max": 4.0,
            "truncated_share": 0.25,
            "kept_groups": 1.0,
            "dropped_groups": 1.0,
            "advantage_abs_mean": 0.5 / (math.sqrt(0.5) + 1e-4),
        }
    )


def test_the_denominator_counts_the_rows_that_are_left():
    """B is counted after dropping groups, so a dull group does not dilute the others."""
    alone = grpo_rows(record(pair("d", 1, 1)), METHOD)
    beside = grpo_rows(record(pair("d", 1, 1), group("dull", *[trajectory((7,), 0.0)] * 8)), METHOD)
    assert alone.data[0].coefficients == beside.data[0].coefficients == (0.0, 0.0, 0.5)


def test_groups_of_equal_rewards_stay_where_they_are_not_dropped():
    rows = grpo_rows(
        record(pair("d", 1, 1), group("dull", *[trajectory((7,), 0.0)] * 2)), method(drop_zero_variance=False)
    )
    assert len(rows.data) == 4
    assert [datum.inputs["advantages"][-1] for datum in rows.data[2:]] == [0.0, 0.0]
    assert rows.data[0].coefficients == (0.0, 0.0, 0.25)
    assert (rows.metrics["kept_groups"], rows.metrics["dropped_groups"]) == (2.0, 0.0)


@pytest.mark.parametrize(("aggregation", "wanted"), [("grpo", 1 / 8), ("token", 1 / 6), ("dr_grpo", 1 / 64)])
def test_an_overlong_trajectory_is_in_no_row_and_no_length(aggregation, wanted):
    """Three of four trajectories have tokens left, 2 each, and B is 4: 1/(4·2), 1/6, 1/(4·16)."""
    cut = trajectory((7,) * 16, 0.0, finish_reason="length")
    whole = [trajectory((7, 2), reward) for reward in (1.0, 0.0, 1.0)]
    rows = grpo_rows(
        record(group("p", whole[0], cut, *whole[1:])), method(mask_overlong=True, loss_aggregation=aggregation)
    )
    assert [datum.name.split()[-1] for datum in rows.data] == ["0", "2", "3"]
    assert [datum.coefficients for datum in rows.data] == [pytest.approx((0.0, 0.0, wanted, wanted))] * 3
    # its reward is in the baseline of its group all the same: [1, 0, 0, 1] → ±0.866
    assert [round(datum.inputs["advantages"][-1], 3) for datum in rows.data] == [0.866, -0.866, 0.866]
    assert rows.metrics["truncated_share"] == 0.25
    assert len(grpo_rows(record(group("p", whole[0], cut, *whole[1:])), METHOD).data) == 4


def test_a_record_of_overlong_trajectories_alone_is_skipped():
    cut = [trajectory((7,) * 16, reward, finish_reason="length") for reward in (1.0, 0.0)]
    rows = grpo_rows(record(group("p", *cut)), method(mask_overlong=True))
    assert (rows.data, rows.metrics["dropped_groups"], rows.metrics["truncated_share"]) == ([], 1.0, 1.0)


@pytest.mark.parametrize(("advantage", "wanted"), [("no_std", [2.0, -1.0, -1.0]), ("leave_one_out", [3.0, -1.5, -1.5])])
def test_the_advantage_is_the_methods(advantage, wanted):
    trio = group("p", *(trajectory((7,), reward) for reward in (4.0, 1.0, 1.0)))
    rows = grpo_rows(record(trio), method(advantage=advantage))
    assert [datum.inputs["advantages"][-1] for datum in rows.data] == pytest.approx(wanted)
    assert rows.metrics["advantage_abs_mean"] == pytest.approx(sum(map(abs, wanted)) / 3)


@pytest.mark.parametrize("aggregation", ["grpo", "token", "dr_grpo"])
def test_a_record_that_teaches_nothing_leaves_no_rows(aggregation):
    dull = record(group("same", trajectory((7,), 0.0), trajectory((8,), 0.0)))
    rows = grpo_rows(dull, method(loss_aggregation=aggregation))
    assert rows.data == []
    assert rows.metrics["advantage_abs_mean"] == 0.0


def test_the_minibatches_of_an_epoch_are_a_partition_and_each_epoch_deals_anew():
    taught = [pair(f"p{i}", 1, 2) for i in range(7)]
    whole = record(taught[0], group("dull", *[trajectory((7,), 0.0)] * 2), *taught[1:])
    settings = method(epochs=2, minibatches=3)

    def dealt(epoch, seed=5, step=1):
        of = whole.model_copy(update={"step": step})
        parts = [grpo_rows(of, settings, epoch, part, seed).data for part in range(3)]
        return [tuple(datum.name.split(",")[0] for datum in data) for data in parts]

    names = [name for part in dealt(0) for name in part]
    assert sorted(names) == sorted(f"p{i}" for i in range(7) for _ in range(2))
    assert list(map(len, dealt(0))) == [6, 4, 4]
    assert dealt(0) == dealt(0)
    assert (
        len({tuple(dealt(epoch, seed, step)) for epoch, seed, step in ((0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 7))})
        == 4
    )


@pytest.mark.parametrize("aggregation", ["grpo", "token", "dr_grpo"])
def test_each_minibatch_weighs_its_own_rows(aggregation):
    """c_t comes from the rows of the optimizer step: B and Σ|y| are the minibatch's."""
    settings = method(minibatches=2, loss_aggregation=aggregation)
    whole = record(pair("a", 1, 3), pair("b", 2, 8))
    for part in range(2):
        data = grpo_rows(whole, settings, 0, part, 0).data
        lengths = [datum.weighed for datum in data]
        wanted = {"grpo": [1 / (2 * n) for n in lengths], "token": [1 / sum(lengths)] * 2, "dr_grpo": [1 / 32] * 2}
        assert [datum.coefficients[-1] for datum in data] == pytest.approx(wanted[aggregation])


def test_a_record_of_several_steps_names_all_its_rows():
    settings = method(minibatches=2)
    whole = record(pair("a", 1, 3), pair("b", 2, 8))
    parts = [grpo_rows(whole, settings, 0, part, 0) for part in range(2)]
    names = [datum.name for datum in parts[0].record]
    assert names == [datum.name for datum in parts[1].record]
    assert sorted(names) == sorted(datum.name for part in parts for datum in part.data)
    assert [d.targets for d in parts[0].record if d.name == parts[0].data[0].name] == [parts[0].data[0].targets]


def test_fewer_groups_than_minibatches_leave_some_of_them_empty():
    settings = method(minibatches=3)
    counts = [len(grpo_rows(record(pair("a", 1, 1)), settings, 0, part, 0).data) for part in range(3)]
    assert counts == [2, 0, 0]
    with pytest.raises(Fatal, match="minibatch 3 of a record that has 3"):
        grpo_rows(record(pair("a", 1, 1)), settings, 0, 3, 0)


def test_the_options_become_the_settings_of_the_loss():
    assert loss_named("grpo", grpo_config(METHOD)).needs == {"advantages"}
    settings = method(
        objective="gspo", clip_low=0.1, clip_high=0.3, correction=Tis(kind="tis", cap=3.0),
        kl=KlPenalty(coefficient=0.05, estimator="k3", times_ratio=True),
    )  # fmt: skip
    assert grpo_config(settings) == {
        "objective": "gspo", "clip_low": 0.1, "clip_high": 0.3, "correction": "tis", "correction_cap": 3.0,
        "kl": "k3", "kl_coefficient": 0.05, "kl_times_ratio": 1.0,
    }  # fmt: skip
    assert grpo_rows(record(pair("a", 1, 1)), settings).reference
    icepop = grpo_config(method(correction=IcePop(kind="icepop", low=0.6, high=4.0)))
    assert {key: icepop[key] for key in icepop if "correction" in key} == {
        "correction": "icepop", "correction_low": 0.6, "correction_high": 4.0,
    }  # fmt: skip
    assert icepop.keys() <= LOSSES["grpo"].defaults.keys()


def test_a_group_that_is_none_is_refused_by_its_prompt():
    with pytest.raises(Fatal, match="prompt one: a group of 1 has no baseline"):
        grpo_rows(record(group("one", trajectory((7,), 1.0))), METHOD)
    with pytest.raises(Fatal, match="prompt nan: reward nan is not finite"):
        grpo_rows(record(group("nan", trajectory((7,), math.nan), trajectory((7,), 1.0))), METHOD)
    torn = Trajectory(token_ids=(1, 2), logprobs=(-1.0,), reward=1.0, finish_reason="stop", text="")
    with pytest.raises(Fatal, match="prompt torn, trajectory 1: 2 tokens but 1 logprobs"):
        grpo_rows(record(group("torn", trajectory((7,), 1.0), torn)), METHOD)
    with pytest.raises(Fatal, match="prompt empty has no tokens"):
        grpo_rows(record(group("empty", trajectory((7,), 1.0), trajectory((7,), 0.0), prompt=())), METHOD)
    with pytest.raises(Fatal, match="step 1 has no trajectories"):
        grpo_rows(record(), METHOD)
    with pytest.raises(Fatal, match=r"temperature 0\.0; training needs more than 0"):
        grpo_rows(record(pair("p", 1, 1), temperature=0.0), METHOD)


def test_the_mismatch_metrics_are_those_of_the_formula():
    rows = grpo_rows(record(group("d", trajectory((7,), 1.0, -1.0), trajectory((8,), 0.0, -2.0))), METHOD)
    found = rows.report(rows.data, [[0.0, 0.0, -1.75], [0.0, 0.0, -1.5]])
    weights = [math.exp(-0.75), math.exp(0.5)]
    assert found == pytest.approx(
        {
            "mismatch_mean": 0.625,
            "mismatch_max": 0.75,
            "ratio_mean": sum(weights) / 2,
            "effective_sample_size": sum(weights) ** 2 / (2 * sum(w * w for w in weights)),
            "clip_share": 0.0,
        }
    )


def test_the_mismatch_is_measured_before_the_record_and_the_clip_and_the_distance_now():
    """lp_old = q + 0.1 everywhere; now lp = lp_old ± 0.5, and lp_ref = lp − 1."""
    rows = grpo_rows(record(pair("d", 1, 1)), method(epochs=2, kl=KlPenalty(coefficient=0.1)))
    now = [[0.0, 0.0, -0.4], [0.0, 0.0, -1.4]]
    data = [
        datum.with_input("old_logprobs", (0.0, 0.0, -0.9)).with_input("ref_logprobs", (0.0, 0.0, lp[-1] - 1))
        for datum, lp in zip(rows.data, now, strict=True)
    ]
    found = rows.report(data, now)
    assert found["mismatch_mean"] == pytest.approx(0.1)
    assert found["ratio_mean"] == pytest.approx(math.exp(0.1))
    assert found["effective_sample_size"] == pytest.approx(1.0)
    # ratio e^0.5 with a positive advantage and e^−0.5 with a negative one: the clip holds both
    assert found["clip_share"] == 1.0
    assert found["kl"] == pytest.approx(math.exp(-1) + 1 - 1)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    # ratios e^0.5, e^−0.1 under a positive advantage, e^−0.5, e^−0.5, e^0.5 under a negative one; the ratios
    # of the sequences are e^0.2 = 1.22 and e^−0.17 = 0.85
    [("grpo", 0.6), ("gspo", 0.4), ("cispo", 0.8)],
)
def test_the_clip_share_is_that_of_the_objective(objective, wanted):
    rows = grpo_rows(record(pair("d", 2, 3)), method(objective=objective, epochs=2))
    old = ((0.0, 0.0, -1.5, -0.9), (0.0, 0.0, -0.5, -0.5, -1.5))
    data = [datum.with_input("old_logprobs", lp) for datum, lp in zip(rows.data, old, strict=True)]
    assert rows.report(data, [[0.0, 0.0, -1.0, -1.0], [0.0, 0.0, -1.0, -1.0, -1.0]])["clip_share"] == wanted


def test_a_second_epoch_is_held_against_the_logprobs_before_the_first(rig):
    """The rows of a later step keep the record's lp_old: the mismatch stays, the ratio moves and is clipped."""
    bench = rig()
    slot = bench.fresh("acme/a")
    settings, whole = method(epochs=2), record(pair("a", 3, 5), pair("b", 2, 8), temperature=0.7)
    steps = [grpo_rows(whole, settings, epoch, 0, 0) for epoch in range(2)]
    old = bench.trainer.forward(slot, steps[0].record, steps[0].call.temperature, lambda: None)
    by_name = {datum.name: row for datum, row in zip(steps[0].record, old, strict=True)}
    reports = []
    for rows in steps:
        data = [datum.with_input("old_logprobs", by_name[datum.name]) for datum in rows.data]
        result = bench.trainer.forward_backward(slot, data, rows.call, lambda: None)
        reports.append(rows.report(data, result.logprobs))
        bench.trainer.optim_step(slot, AdamParams(learning_rate=5e-2, eps=1e-8))
    assert reports[0]["clip_share"] == 0.0
    assert reports[1]["clip_share"] > 0.3
    assert reports[1]["mismatch_mean"] == reports[0]["mismatch_mean"] > 1.0


def test_at_temperature_0_6_the_mean_ratio_is_one(rig):
    """trl#4159, prime-rl#697: tokens sampled by Transformers at T = 0.6 → mean ratio 1 within 0.02."""
    bench = rig()
    slot = bench.fresh("acme/a", shape=SlotShape(4, 8.0, False, ("q_proj", "v_proj")))
    with torch.no_grad():
        for name in sorted(slot.parameters):
            slot.parameters[name].add_(0.02)
        # the random base's logits are near 0 at any temperature; so they are as peaked as a trained one's
        bench.base.module.model.norm.weight.mul_(12)
    torch.manual_seed(3)
    with bench.base.router.applied([slot.span()]):
        out = bench.base.module.generate(
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
    sampled = group("p", *trajectories, prompt=(1, 50, 60, 70))

    def measured(temperature):
        rows = grpo_rows(record(sampled, temperature=temperature), METHOD)
        result = bench.trainer.forward_backward(slot, rows.data, rows.call, lambda: None)
        return rows.report(rows.data, result.logprobs)

    found = measured(0.6)
    assert found["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert found["mismatch_max"] < 1e-3
    assert found["effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
    assert abs(measured(1.0)["ratio_mean"] - 1.0) > 0.02
