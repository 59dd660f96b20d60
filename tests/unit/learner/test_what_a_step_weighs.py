"""What each token weighs, from the record or the chats to the loss that the trainer reports."""

from __future__ import annotations

import pytest
import torch
from mint_schemas.training import ArithmeticTask, Grpo

from services.learner.grpo import grpo_rows
from services.learner.sft import sft_rows
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.text.codec import TextCodec

METHOD = Grpo(kind="grpo", task=ArithmeticTask(kind="arithmetic"), steps=1)


def _go_on() -> None:
    return None


def _trajectory(token, length, reward):
    return Trajectory(
        token_ids=(token,) * length, logprobs=(-9.0,) * length, reward=reward, finish_reason="length", text=""
    )


def _record(prompt_length, *trajectories, max_tokens=16):
    group = Group(prompt_id="p", prompt_ids=(1,) * prompt_length, answer="", trajectories=trajectories)
    return RolloutRecord(
        run_id="run", step=1, policy="acme/a", base="tiny/llama", base_sha256="0" * 64, revision=None,
        adapter_sha256=None, temperature=1.0, max_tokens=max_tokens, task_sha256="0" * 64, seed=0, groups=(group,),
    )  # fmt: skip


@pytest.mark.parametrize(("aggregation", "wanted"), [("grpo", 0.0), ("token", 0.6), ("dr_grpo", 0.1875)])
@pytest.mark.parametrize("max_tokens", [4096, 1])
def test_the_length_bias_of_a_trained_step(rig, aggregation, wanted, max_tokens):
    """trl#2995, trl#3138: lengths 2 (+1) and 8 (−1) at ratio 1, in one micro-batch and in two; the
    advantages of two trajectories are ±a, so that the loss is `wanted` times a."""
    method = METHOD.model_copy(update={"loss_aggregation": aggregation})
    rows = grpo_rows(_record(3, _trajectory(7, 2, 1.0), _trajectory(8, 8, 0.0)), method)
    a = rows.data[0].inputs["advantages"][-1]
    assert (rows.data[1].inputs["advantages"][-1], a > 0) == (pytest.approx(-a), True)
    bench = rig(max_tokens=max_tokens)
    result = bench.trainer.forward_backward(bench.fresh("acme/a"), rows.data, rows.call, _go_on)
    assert result.loss / a == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("prompt_length", [1, 7, 40])
@pytest.mark.parametrize("aggregation", ["grpo", "token"])
def test_a_longer_prompt_weighs_nothing(prompt_length, aggregation):
    """trl#6439: 4 kept tokens with loss 1 each are a mean of 1.0, however many masked ones stand before."""
    method = METHOD.model_copy(update={"loss_aggregation": aggregation})
    rows = grpo_rows(_record(prompt_length, _trajectory(7, 4, 1.0), _trajectory(8, 4, 0.0)), method)
    assert [sum(datum.mask) for datum in rows.data] == [4, 4]
    assert sum(sum(datum.coefficients) for datum in rows.data) == pytest.approx(1.0)
    assert all(c == 0.0 for d in rows.data for c, kept in zip(d.coefficients, d.mask, strict=True) if not kept)


def test_the_loss_of_chats_is_the_mean_over_what_the_assistant_says(rig, tiny_directory):
    """trl#6439: equal to the loss of Transformers with everything else labelled −100."""
    codec = TextCodec.load(tiny_directory)
    chat = ({"role": "user", "content": "word " * 30}, {"role": "assistant", "content": "yes"})
    rows = sft_rows([("chat-1", chat)], codec, 1024)
    (datum,) = rows.data
    assert sum(datum.mask) < len(datum.mask) / 5
    bench = rig()
    slot = bench.fresh("acme/a")
    ours = bench.trainer.forward_backward(slot, rows.data, rows.call, _go_on)
    ids = [*datum.input_ids, datum.targets[-1]]
    labels = [-100, *(t if m else -100 for t, m in zip(datum.targets, datum.mask, strict=True))]
    with bench.base.router.applied([slot.span()]):
        theirs = bench.base.module(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    assert ours.loss == pytest.approx(float(theirs.detach()), rel=1e-5)
