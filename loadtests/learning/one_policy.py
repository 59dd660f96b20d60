"""One policy: tokens per second of forward_backward + optim_step, against plain PEFT on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loadtests.learning.rig import (
    ADAM,
    BATCH_TOKENS,
    CALL,
    SHAPE,
    Rig,
    chats,
    go_on,
    interleaved,
    median,
    smollm2,
    spread,
    sums,
    tokens,
)
from services.learner.datum import Datum, cost


def measure(rounds: int) -> list[dict[str, Any]]:
    figures = []
    for name, rows in (("48 sums", sums(48, seed=1)), ("8 chats", chats(8, seed=1))):
        cases = {
            "PEFT, rows as they come": peft_step(rows, _in_order(rows)),
            "PEFT, by length": peft_step(rows, _in_order(_by_length(rows))),
            "MinT padded, rows as they come": ours(rows, packing=False, bucketing=False),
            "MinT padded, by length": ours(rows, packing=False),
            "MinT packed": ours(rows, packing=True),
        }
        seconds = interleaved(cases, rounds)
        peer = median(seconds["PEFT, rows as they come"])
        for case, taken in seconds.items():
            figures.append(
                {
                    "batch": name, "tokens": tokens(rows), "case": case, "tokens_per_s": tokens(rows) / median(taken),
                    "ratio_to_peft": peer / median(taken), "spread": spread(taken),
                }
            )  # fmt: skip
    return figures


def ours(rows: Sequence[Datum], packing: bool, bucketing: bool = True) -> Callable[[], object]:
    rig = Rig(packing=packing)
    slot = rig.fresh("bench/a")
    # without bucketing, each call is one micro-batch of rows as they come
    calls = [list(rows)] if bucketing else _in_order(rows)

    def step() -> None:
        for call in calls:
            rig.trainer.forward_backward(slot, call, CALL, go_on)
        rig.trainer.optim_step(slot, ADAM)

    return step


def peft_step(rows: Sequence[Datum], batches: Sequence[Sequence[Datum]]) -> Callable[[], object]:
    """The usual loop: bf16 base, fp32 adapters under autocast, the model's own loss, `torch.optim.AdamW`."""
    base = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16, local_files_only=True)
    config = LoraConfig(r=SHAPE.rank, lora_alpha=int(SHAPE.alpha), target_modules=list(SHAPE.target_modules))
    model = get_peft_model(base, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=ADAM.learning_rate)
    total = sum(row.weighed for row in rows)
    prepared = [_padded(batch) for batch in batches]

    def step() -> None:
        for batch in prepared:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch, num_items_in_batch=total).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(rows: Sequence[Datum]) -> dict[str, torch.Tensor]:
    longest = max(len(row.input_ids) for row in rows) + 1
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        whole = torch.tensor([*row.input_ids, row.targets[-1]])
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        taken = torch.tensor([False, *row.mask])
        labels[i, : len(whole)][taken] = whole[taken]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _in_order(rows: Sequence[Datum]) -> list[list[Datum]]:
    """Batches of at most BATCH_TOKENS padded tokens, rows as they come."""
    batches: list[list[Datum]] = [[]]
    for row in rows:
        if batches[-1] and cost([*batches[-1], row], padded=True) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _by_length(rows: Sequence[Datum]) -> list[Datum]:
    return sorted(rows, key=lambda row: -len(row.input_ids))
