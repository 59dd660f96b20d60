"""The same loop in one process, with PEFT and Transformers and nothing else: what a server is measured against.

`python -m loadtests.interface.plain CLIENTS ROWS PROMPTS SAMPLES TOKENS STEPS`; several clients are adapters of one
base, a step of each in turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from loadtests.interface.loop import RANK, RATE, Size, Turn, prompt_of, rows_of
from loadtests.learning.rig import SHAPE, answer, smollm2
from services.learner.datum import Datum

PADDING = 2


def main() -> None:
    clients, *numbers = (int(argument) for argument in sys.argv[1:])
    size = Size(*numbers)
    trainees = _trainees(clients, size)
    nll = [trainee.step() for trainee in trainees]
    for trainee in trainees:
        trainee.sampled = 0
    began = time.perf_counter()
    for _ in range(size.steps):
        for trainee in trainees:
            trainee.step()
    seconds = time.perf_counter() - began
    sampled = sum(trainee.sampled for trainee in trainees)
    answer(asdict(Turn(clients * size.steps / seconds, nll[0], sampled)))


def _trainees(clients: int, size: Size) -> list[Trainee]:
    """bf16 base, fp32 adapters under autocast, as people train."""
    base = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16, local_files_only=True)
    config = LoraConfig(r=RANK, lora_alpha=int(SHAPE.alpha), target_modules=list(SHAPE.target_modules))
    names = [f"client{number}" for number in range(clients)]
    model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return [Trainee(model, name, rows_of(size, number), size) for number, name in enumerate(names)]


class Trainee:
    def __init__(self, model: PeftModel, name: str, rows: Sequence[Datum], size: Size) -> None:
        self._model, self._name, self._size = model, name, size
        self._ids, self._labels, self._attended = _padded(rows)
        self._weights = sum(sum(row.inputs["weights"]) for row in rows)
        self._prompts = [torch.tensor(prompt_of(row)) for row in rows[: size.prompts]]
        parameters = [value for key, value in model.named_parameters() if f".{name}." in key]
        for parameter in parameters:
            parameter.data = parameter.data.float()
        self._optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        self.sampled = 0

    def step(self) -> float:
        """The mean NLL before it."""
        self._model.set_adapter(self._name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            batch = {"input_ids": self._ids, "attention_mask": self._attended, "labels": self._labels}
            loss = self._model(**batch, num_items_in_batch=1).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for prompt in self._prompts:
            self.sampled += self._sample(prompt)
        return float(loss.detach()) / self._weights

    @torch.inference_mode()
    def _sample(self, prompt: Tensor) -> int:
        prompts = prompt.repeat(self._size.samples, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = self._model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=self._size.tokens,
                max_new_tokens=self._size.tokens,
                pad_token_id=PADDING,
            )
        return whole[:, prompts.shape[1] :].numel()


def _padded(rows: Sequence[Datum]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (-100 where nothing is learnt) and attention, [rows, longest]."""
    longest = max(len(row.input_ids) for row in rows) + 1
    ids = torch.full((len(rows), longest), PADDING)
    labels = torch.full((len(rows), longest), -100)
    attended = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        whole = torch.tensor([*row.input_ids, row.targets[-1]])
        ids[place, : len(whole)], attended[place, : len(whole)] = whole, 1
        taken = torch.tensor([False, *row.mask])
        labels[place, : len(whole)][taken] = whole[taken]
    return ids, labels, attended


if __name__ == "__main__":
    main()
