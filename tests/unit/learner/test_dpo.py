"""From preference pairs to rows: what they hold, what they weigh, what is reported, and that they are learnt."""

from __future__ import annotations

import math

import pytest
import torch

from services.learner.dpo import dpo_rows, step_pairs
from services.learner.losses import Rows, loss_named
from services.learner.optimizer import AdamParams
from shared.errors import Fatal
from shared.tasks import Pair
from shared.text.codec import TextCodec
from tests.unit.learner.formulas import flatten, random_rows


def pair(name, chosen, rejected, prompt="What is 2+2?"):
    return Pair(
        name,
        ({"role": "user", "content": prompt},),
        ({"role": "assistant", "content": chosen},),
        ({"role": "assistant", "content": rejected},),
    )


PAIRS = [pair(f"line-{i + 1}", f"it is {i}", "no idea, sorry") for i in range(5)]


@pytest.fixture(scope="module")
def codec(tiny_directory):
    return TextCodec.load(tiny_directory)


def _go_on() -> None:
    return None


def test_each_pair_comes_once_before_any_comes_twice():
    names = [pair.name for step in range(1, 6) for pair in step_pairs(PAIRS, 3, step, 2)]
    assert sorted(names[:5]) == sorted(names[5:]) == [f"line-{i + 1}" for i in range(5)]
    assert names[:5] != names[5:]
    assert step_pairs(PAIRS, 3, 2, 2) == step_pairs(PAIRS, 3, 2, 2)
    with pytest.raises(Fatal, match="no rows"):
        step_pairs([], 3, 1, 2)


def test_a_pair_is_its_prompt_with_either_completion_and_the_completion_weighs(codec):
    rows = dpo_rows(PAIRS[:2], codec, 512, beta=0.1)
    assert [datum.name for datum in rows.data] == [
        "line-1, chosen",
        "line-1, rejected",
        "line-2, chosen",
        "line-2, rejected",
    ]
    said = [codec.decode([t for t, m in zip(d.targets, d.mask, strict=True) if m], False) for d in rows.data]
    assert said == ["it is 0<|im_end|>", "no idea, sorry<|im_end|>", "it is 1<|im_end|>", "no idea, sorry<|im_end|>"]
    prompts = {tuple(i for i, m in zip(d.input_ids, d.mask, strict=True) if not m) for d in rows.data}
    assert len(prompts) == 1
    assert [datum.pair for datum in rows.data][::2] == [datum.pair for datum in rows.data][1::2]
    assert {c for datum in rows.data for c in datum.coefficients} == {0.0, 0.5}
    assert (rows.call.name, rows.call.config, rows.reference) == ("dpo", {"beta": 0.1}, True)
    assert rows.metrics == {"truncated_rows": 0.0, "pairs": 2.0}


def test_the_same_pair_twice_in_a_step_is_two_pairs(codec):
    rows = dpo_rows([PAIRS[0], PAIRS[0]], codec, 512, beta=0.1)
    assert len({datum.pair for datum in rows.data}) == 2


def test_a_row_is_cut_at_its_end_and_a_pair_without_a_completion_left_takes_no_part(codec):
    long = pair("line-9", "word " * 100, "no")
    lost = pair("line-10", "yes", "no", prompt="word " * 100)
    rows = dpo_rows([long, lost, PAIRS[0]], codec, 60, beta=0.1)
    assert [datum.name for datum in rows.data][::2] == ["line-9, chosen", "line-1, chosen"]
    assert len(rows.data[0].input_ids) == 59
    assert rows.data[0].input_ids == dpo_rows([long], codec, 512, beta=0.1).data[0].input_ids[:59]
    # both rows of the lost pair and one of the long one
    assert rows.metrics == {"truncated_rows": 3.0, "pairs": 2.0}
    assert {c for datum in rows.data for c in datum.coefficients} == {0.0, 0.5}
    assert dpo_rows([lost], codec, 60, beta=0.1).data == []
    exact = len(dpo_rows(PAIRS[:1], codec, 512, beta=0.1).data[1].input_ids) + 1
    assert dpo_rows(PAIRS[:1], codec, exact, beta=0.1).metrics == {"truncated_rows": 0.0, "pairs": 1.0}


def test_the_weighed_loss_is_the_mean_over_the_pairs_of_the_formula(codec):
    """−log σ(β[(lp − ref)_chosen − (lp − ref)_rejected]) in plain arithmetic."""
    rows = dpo_rows(PAIRS[:3], codec, 512, beta=0.3)
    lp, ref = _numbers(rows.data, 1), _numbers(rows.data, 2)
    margins = [_moved(rows.data, lp, ref, i) - _moved(rows.data, lp, ref, i + 1) for i in (0, 2, 4)]
    wanted = sum(math.log(1 + math.exp(-0.3 * margin)) for margin in margins) / 3
    assert _weighed(rows, lp, ref) == pytest.approx(wanted, rel=1e-9)


def test_what_is_reported_are_the_implicit_rewards(codec):
    rows = dpo_rows(PAIRS[:3], codec, 512, beta=0.3)
    lp, ref = _numbers(rows.data, 1), _numbers(rows.data, 2)
    moved = [_moved(rows.data, lp, ref, i) for i in range(6)]
    margins = [moved[i] - moved[i + 1] for i in (0, 2, 4)]
    assert 0 < sum(margin > 0 for margin in margins) < 3
    data = [datum.with_input("ref_logprobs", row) for datum, row in zip(rows.data, ref, strict=True)]
    assert rows.report(data, lp) == pytest.approx(
        {
            "margin": sum(margins) / 3,
            "accuracy": sum(margin > 0 for margin in margins) / 3,
            "chosen_reward": 0.3 * sum(moved[::2]) / 3,
            "rejected_reward": 0.3 * sum(moved[1::2]) / 3,
        },
        rel=1e-9,
    )
    # where nothing has moved yet no pair is in order
    assert rows.report(data, ref)["accuracy"] == 0.0


def test_swapping_the_sides_turns_the_margin():
    """σ(h) + σ(−h) = 1, so that exp(−ℓ) of a pair and of its swap add up to 1."""
    rows = random_rows(4, count=2, names=("ref_logprobs",))
    sides = []
    for order in (rows, rows[::-1]):
        lp, inputs, _, structure = flatten(order, ("ref_logprobs",))
        sides.append(loss_named("dpo", {})(lp, inputs, {"beta": 0.7}, structure).sum().item())
    assert math.exp(-sides[0]) + math.exp(-sides[1]) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("max_tokens", [4096, 1])
def test_a_fresh_adapter_starts_at_log_2_and_learns_the_preference(rig, codec, max_tokens):
    """Adapter and reference agree at first: loss ln 2, margin 0; after 5 steps each pair is in order."""
    bench = rig(max_tokens=max_tokens)
    slot, trainer = bench.fresh("acme/a"), bench.trainer
    rows = dpo_rows(PAIRS, codec, 512, beta=0.1)
    reference = trainer.forward(None, rows.data, rows.call.temperature, _go_on)
    data = [datum.with_input("ref_logprobs", row) for datum, row in zip(rows.data, reference, strict=True)]
    first = trainer.forward_backward(slot, data, rows.call, _go_on)
    assert first.loss == pytest.approx(math.log(2), rel=1e-5)
    assert rows.report(data, first.logprobs)["margin"] == pytest.approx(0.0, abs=1e-3)
    for _ in range(5):
        trainer.optim_step(slot, AdamParams(learning_rate=2e-2, eps=1e-8))
        last = trainer.forward_backward(slot, data, rows.call, _go_on)
    assert last.loss < first.loss - 0.05
    assert rows.report(data, last.logprobs)["accuracy"] == 1.0


def _numbers(data, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(-3 * torch.rand(len(d.targets), generator=generator, dtype=torch.float64)).tolist() for d in data]


def _moved(data, lp, ref, i):
    return sum(a - b for a, b, kept in zip(lp[i], ref[i], data[i].mask, strict=True) if kept)


def _weighed(rows, lp, ref):
    def flat(arrays):
        kept = [
            v
            for array, datum in zip(arrays, rows.data, strict=True)
            for v, m in zip(array, datum.mask, strict=True)
            if m
        ]
        return torch.tensor(kept, dtype=torch.float64)

    owner = torch.tensor([i for i, datum in enumerate(rows.data) for _ in range(datum.weighed)])
    structure = Rows(owner, 6, torch.tensor([[0, 1], [2, 3], [4, 5]]))
    losses = loss_named("dpo", rows.call.config)(flat(lp), {"ref_logprobs": flat(ref)}, rows.call.config, structure)
    return float((losses * flat([datum.coefficients for datum in rows.data])).sum())
