"""SFT equals Transformers' own loss, and its gradients PEFT's, through a model in fp32."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from services.learner.sft import sft_rows
from services.learner.slots import SlotShape
from shared.text.codec import TextCodec

SHAPE = SlotShape(4, 8.0, False, ("q_proj", "v_proj", "down_proj"))
CHATS = [
    ("a", ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, how are you today?"})),
    ("b", ({"role": "user", "content": "word " * 30}, {"role": "assistant", "content": "yes"})),
    (
        "c",
        (
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And 3+3?"},
            {"role": "assistant", "content": "That is 6."},
        ),
    ),
]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("max_tokens", [4096, 1])
def test_sft_equals_transformers_loss_and_pefts_gradients(rig, tiny_directory, train_on, max_tokens):
    rows = sft_rows(CHATS, TextCodec.load(tiny_directory), 1024, train_on)
    bench = rig(max_tokens=max_tokens)
    slot = bench.fresh("acme/a", shape=SHAPE)
    with torch.no_grad():
        for parameter in slot.parameters.values():
            parameter.add_(0.01)  # B = 0 would leave A without a gradient
    ours = bench.trainer.forward_backward(slot, rows.data, rows.call, lambda: None)
    model = _peft_model(tiny_directory, slot)
    theirs = model(**_padded(rows.data)).loss
    theirs.backward()
    assert ours.loss == pytest.approx(theirs.item(), rel=1e-5)
    assert rows.report(rows.data, ours.logprobs)["nll"] == pytest.approx(theirs.item(), rel=1e-5)
    wanted = {_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert slot.gradients is not None
    assert wanted.keys() == slot.gradients.keys()
    difference = sum(float((slot.gradients[n].double() - g.double()).pow(2).sum()) for n, g in wanted.items())
    whole = sum(float(g.double().pow(2).sum()) for g in wanted.values())
    assert (difference / whole) ** 0.5 < 1e-5


def _peft_model(directory, slot):
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(r=SHAPE.rank, lora_alpha=SHAPE.alpha, target_modules=list(SHAPE.target_modules))
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(slot.parameters[_name(name)])
    return model


def _name(peft_name):
    return peft_name.removeprefix("base_model.model.").replace(".default.", ".")


def _padded(data):
    """input_ids, attention_mask and labels [R, longest + 1] with −100 on all that is not trained on."""
    longest = max(len(datum.input_ids) for datum in data) + 1
    ids = torch.zeros((len(data), longest), dtype=torch.long)
    labels, attention = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, datum in enumerate(data):
        whole = torch.tensor([*datum.input_ids, datum.targets[-1]])
        ids[i, : len(whole)], attention[i, : len(whole)] = whole, 1
        trained = [False, *datum.mask]
        labels[i, : len(whole)] = torch.where(torch.tensor(trained), whole, -100)
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}
