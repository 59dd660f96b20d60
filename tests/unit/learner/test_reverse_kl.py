"""Target logprobs and reverse KL against PyTorch's own formulas, and the reverse KL of rows through the base."""

from __future__ import annotations

import pytest
import torch

from services.learner import logprobs
from services.learner.logprobs import target_logprobs
from services.learner.optimizer import AdamParams
from services.learner.reverse_kl import KlRow, reverse_kl_divergence
from services.learner.slots import SlotShape
from shared.errors import Fatal, Retryable
from tests.unit.learner.batches import go_on, relative_l2, shake

TEMPERATURES = [1.0, 0.6, 2.5]


def _logits(rows, vocabulary, seed, dtype=torch.float64):
    drawn = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return drawn.to(dtype).requires_grad_(True)


@pytest.fixture(params=["whole", "chunks"])
def chunks(request, monkeypatch):
    """A few rows at a time, as with a large vocabulary, the last chunk shorter than the others."""
    if request.param == "chunks":
        monkeypatch.setattr(logprobs, "CHUNK_NUMBERS", 25)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_target_logprobs_and_their_gradient(temperature):
    """Equal to log_softmax(logits/T)[target] to 1e-9 in float64, and by finite differences."""
    logits, targets = _logits(5, 11, 0), torch.tensor([0, 10, 3, 3, 7])
    weight = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = target_logprobs(logits, targets, temperature)
    (gradient,) = torch.autograd.grad((ours * weight).sum(), logits)
    theirs = torch.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]
    (wanted,) = torch.autograd.grad((theirs * weight).sum(), logits)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: target_logprobs(x, targets, temperature), (logits,))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_reverse_kl_and_its_gradient(temperature):
    """Equal to Σ p_s (log p_s − log p_ref) at logits/T to 1e-9 in float64, with no T²; nothing reaches the
    reference."""
    student, reference = _logits(5, 11, 0), _logits(5, 11, 1)
    weight = torch.rand(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = reverse_kl_divergence(student, reference, temperature)
    gradient, nothing = torch.autograd.grad((ours * weight).sum(), (student, reference), allow_unused=True)
    theirs = _formula(student, reference, temperature)
    (wanted,) = torch.autograd.grad((theirs * weight).sum(), student)
    assert nothing is None
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12)
    fixed = reference.detach()
    assert torch.autograd.gradcheck(lambda x: reverse_kl_divergence(x, fixed, temperature), (student,))


def _formula(student, reference, temperature):
    ours, theirs = (torch.log_softmax(logits / temperature, -1) for logits in (student, reference.detach()))
    return torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_comes_out_in_fp32_with_gradients_in_its_own(dtype):
    student, reference = _logits(5, 11, 0, dtype), _logits(5, 11, 1, dtype).detach()
    targets = torch.tensor([0, 10, 3, 3, 7])
    for found, wanted in (
        (target_logprobs(student, targets, 0.6), target_logprobs(student.double(), targets, 0.6)),
        (reverse_kl_divergence(student, reference, 0.6), _formula(student.double(), reference.double(), 0.6)),
    ):
        assert found.dtype is torch.float32
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert gradient.dtype is dtype


def _rows(prompts=((4, 9), (3, 1), (6, 6))):
    """The student's prompt and the reference's have lengths of their own; the targets are the same."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, (mine, theirs) in enumerate(prompts):
        completion = torch.randint(3, 49152, (3 + number,), generator=generator).tolist()

        def side(length, completion=completion):
            ids = torch.randint(3, 49152, (length,), generator=generator).tolist() + completion[:-1]
            return tuple(ids), tuple(i >= length - 1 for i in range(len(ids)))

        student, reference = side(mine), side(theirs)
        weights = tuple(torch.rand(len(student[0]), generator=generator, dtype=torch.float64).tolist())
        rows.append(KlRow(f"row{number}", *student, *reference, weights))
    return rows


def _at_targets(bench, slot, ids, mask):
    spans = [slot.span()] if slot is not None else []
    with bench.base.router.applied(spans):
        return bench.base.module(input_ids=torch.tensor([ids])).logits[0][torch.tensor(mask)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [4096, 1])
@pytest.mark.parametrize("kind", ["base", "adapter", "itself"])
def test_the_reverse_kl_of_rows_equals_the_formula(rig, kind, packing, max_tokens):
    """Weights, other prompts for the reference, T = 0.6; loss, losses by row and gradients to 1e-9 in
    float64, and no gradient to the reference, be it another adapter, the base or the student's own."""
    bench = rig("float64", max_tokens, packing=packing)
    slot = shake(bench.fresh("acme/a"), seed=1)
    other = shake(bench.fresh("acme/ref", shape=SlotShape(2, 8.0, True, ("k_proj", "up_proj"))), seed=2)
    reference = {"base": None, "adapter": other, "itself": slot}[kind]
    answer = bench.trainer.reverse_kl(slot, reference, _rows(), 0.6, go_on)

    losses = []
    for row in _rows():
        student = _at_targets(bench, slot, row.student_ids, row.student_mask)
        with torch.no_grad():
            theirs = _at_targets(bench, reference, row.reference_ids, row.reference_mask)
        weights = torch.tensor(row.weights, dtype=torch.float64)[torch.tensor(row.student_mask)]
        losses.append((_formula(student, theirs, 0.6) * weights).sum())
    wanted = torch.autograd.grad(sum(losses), list(slot.parameters.values()))
    assert answer.losses == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-9)
    assert answer.loss == pytest.approx(sum(answer.losses), rel=1e-9)
    assert answer.loss > 1e-4
    assert relative_l2(slot.flat_gradients, torch.cat([g.flatten() for g in wanted])) < 1e-9
    assert other.gradients is None


def test_a_student_that_is_its_reference_has_nothing_to_learn(rig):
    bench = rig("float64")
    slot = shake(bench.fresh("acme/a"))
    rows = [
        KlRow(row.name, row.student_ids, row.student_mask, row.student_ids, row.student_mask, row.weights)
        for row in _rows()
    ]
    assert bench.trainer.reverse_kl(slot, slot, rows, 0.6, go_on).loss == pytest.approx(0.0, abs=1e-12)
    assert float(slot.flat_gradients.norm()) < 1e-12


def test_steps_on_the_reverse_kl_bring_the_student_to_its_reference(rig):
    bench = rig()
    slot, reference = bench.fresh("acme/a"), shake(bench.fresh("acme/ref", seed=4), size=0.3)
    losses = []
    for _ in range(8):
        losses.append(bench.trainer.reverse_kl(slot, reference, _rows(), 1.0, go_on).loss)
        bench.trainer.optim_step(slot, AdamParams(learning_rate=2e-2, eps=1e-8))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reference_mask": (True, False)}, "row row0: 4 target positions of the student, 1 of the reference"),
        ({"reference_ids": (49152, 5)}, "row row0: token id 49152 is outside the vocabulary"),
        ({"weights": (1.0,)}, "row row0: weights has length 1, the row 4"),
        ({"weights": (1.0, 1.0, 1.0, float("inf"))}, "row row0: weights holds a number that is not finite"),
        ({"student_ids": (5,) * 1025}, "row row0: 1025 tokens; a row has 1 to 1024"),
    ],
)
def test_a_bad_row_is_refused_with_the_reason(rig, changes, reason):
    bench = rig()
    slot = bench.fresh("acme/a")
    good = {
        "student_ids": (5, 6, 7, 8), "student_mask": (True,) * 4, "reference_ids": (5, 6),
        "reference_mask": (True, True), "weights": (1.0,) * 4,
    }  # fmt: skip
    with pytest.raises(Fatal, match=reason):
        bench.trainer.reverse_kl(slot, None, [KlRow(name="row0", **{**good, **changes})], 1.0, go_on)
    assert slot.gradients is None


def test_a_divergence_that_is_not_finite_names_its_row_and_a_lost_lease_ends_the_call(rig):
    bench = rig(max_tokens=1)
    slot = bench.fresh("acme/a")
    rows = _rows()
    # the weights are finite, their product with the divergence is not
    bench.base.module.model.norm.weight.data.mul_(1e4)
    broken = KlRow(**{**vars(rows[1]), "weights": (3e38,) * len(rows[1].weights)})
    shake(slot, size=1.0)
    with pytest.raises(Fatal, match="row row1: its loss is inf; no step was made"):
        bench.trainer.reverse_kl(slot, None, [rows[0], broken, rows[2]], 1.0, go_on)

    def lose():
        raise Retryable("lease lost")

    with pytest.raises(Retryable, match="lease lost"):
        bench.trainer.reverse_kl(slot, None, rows, 1.0, lose)
    assert slot.gradients is None
