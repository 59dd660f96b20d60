"""The learning rate of each step against numbers, PyTorch's schedulers and Transformers'."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from mint_schemas.training import Optimizer
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler

from services.learner.schedule import learning_rate


def rates(steps, **settings):
    optimizer = Optimizer(**{"learning_rate": 0.1, **settings})
    return [learning_rate(optimizer, step, steps) for step in range(1, steps + 1)]


def scheduled(make, steps):
    """The rate that each of `steps` optimizer steps would have with a PyTorch scheduler at 0.1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer never steps, which is not what the scheduler is for
        scheduler, found = make(optimizer), []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return found


def test_constant_is_the_rate_at_every_step():
    assert rates(5) == [0.1] * 5
    assert rates(3, final_ratio=0.5) == [0.1] * 3


def test_warm_up_rises_by_equal_steps_and_wastes_none_at_zero():
    assert rates(6, warmup_steps=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rel=1e-12)
    assert rates(3, warmup_steps=10) == pytest.approx([0.01, 0.02, 0.03], rel=1e-12)
    assert rates(3, warmup_steps=3, schedule="linear") == pytest.approx([0.1 / 3, 0.2 / 3, 0.1], rel=1e-12)


def test_linear_and_cosine_by_the_formula():
    assert rates(4, schedule="linear") == pytest.approx([0.1, 0.075, 0.05, 0.025], rel=1e-12)
    assert rates(4, schedule="linear", final_ratio=0.2) == pytest.approx([0.1, 0.08, 0.06, 0.04], rel=1e-12)
    wanted = [0.05 * (1 + math.cos(math.pi * p)) for p in (0, 0.25, 0.5, 0.75)]
    assert rates(6, schedule="cosine", warmup_steps=2) == pytest.approx([0.05, 0.1, *wanted], rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_last_step_is_never_at_zero_and_nothing_is_above_the_peak(schedule, warmup):
    found = rates(8, schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= 0.1 for rate in found)
    assert max(found) == pytest.approx(0.1, rel=1e-12)
    assert rates(8, schedule=schedule, warmup_steps=warmup, learning_rate=0.0) == [0.0] * 8


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_it_is_transformers_schedule(schedule, warmup):
    theirs = scheduled(lambda o: get_scheduler(schedule, o, num_warmup_steps=warmup, num_training_steps=20), 20)
    assert rates(20, schedule=schedule, warmup_steps=warmup)[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)


def test_a_cosine_to_a_floor_is_transformers():
    def make(optimizer):
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 20, min_lr_rate=0.1)

    found = rates(20, schedule="cosine", warmup_steps=3, final_ratio=0.1)
    assert found[3:] == pytest.approx(scheduled(make, 20)[3:], rel=1e-12)


def test_without_a_warm_up_it_is_pytorchs():
    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.02)

    def linear(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=20)

    assert rates(20, schedule="cosine", final_ratio=0.2) == pytest.approx(scheduled(cosine, 20), rel=1e-12)
    assert rates(20, schedule="linear", final_ratio=0.2) == pytest.approx(scheduled(linear, 20), rel=1e-12)


@pytest.mark.parametrize("step", [0, 6, -1])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=f"step {step} is outside the run's 1 … 5"):
        learning_rate(Optimizer(learning_rate=0.1), step, 5)
