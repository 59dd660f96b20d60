"""LoRA on the resident base: which adapter each token of a forward pass goes through.

A router hooks every linear layer that an adapter may target; between forward passes it applies nothing.
In: the spans of one batch, each a stretch of tokens and the adapter for it. Out: base output + s·B·A·x,
gradients for A and B of each span apart (arXiv:2106.09685). Invariant: a token meets one adapter at most,
and no adapter outlives the `applied` block that named it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Span:
    """Tokens `start` ≤ i < `stop` of the flattened batch; `stop` None = to its end, however long.

    `tensors`: module path → (A [r, in], B [out, r]); a layer without an entry is left alone."""

    tensors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    start: int = 0
    stop: int | None = None


class AdapterRouter:
    """`layers`: path → the linear layers of `module` whose last name is one of `targets`."""

    def __init__(self, module: nn.Module, targets: Sequence[str]) -> None:
        wanted = frozenset(targets)
        self.layers: dict[str, nn.Linear] = {
            path: layer
            for path, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and path.rsplit(".", 1)[-1] in wanted
        }
        self._spans: Sequence[Span] = ()
        for path, layer in self.layers.items():
            layer.register_forward_hook(partial(self._hook, path))

    @contextmanager
    def applied(self, spans: Sequence[Span]) -> Iterator[None]:
        """Forward passes inside go through `spans`; they are in order and do not overlap."""
        self._spans = spans
        try:
            yield
        finally:
            self._spans = ()

    def _hook(self, path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._spans:
            return None
        x, y = inputs[0].flatten(0, -2), output.flatten(0, -2)
        pieces: list[Tensor] = []
        at = 0
        for span in self._spans:
            pair = span.tensors.get(path)
            if pair is None:
                continue
            stop = len(y) if span.stop is None else span.stop
            if stop > len(y):
                raise ValueError(f"{path} saw {len(y)} tokens of a batch of {stop}; it cannot serve several adapters")
            if span.start > at:
                pieces.append(y[at : span.start])
            pieces.append(_AddLora.apply(y[span.start : stop], x[span.start : stop], *pair, span.scaling))
            at = stop
        if not pieces:
            return None
        if at < len(y):
            pieces.append(y[at:])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return joined.view(output.shape)


class _AddLora(torch.autograd.Function):
    """y + s·(x·Aᵀ)·Bᵀ for y [N, out], x [N, in], in y's precision; A and B may be of a higher one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        down, up = a.to(x.dtype), b.to(x.dtype)
        hidden = x @ down.t()
        ctx.save_for_backward(x, hidden, down, up)
        ctx.scaling, ctx.dtype = scaling, a.dtype
        return torch.addmm(y, hidden, up.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, hidden, down, up = ctx.saved_tensors
        towards = (gradient @ up).mul_(ctx.scaling)
        to_x = towards @ down if ctx.needs_input_grad[1] else None
        to_a = (towards.t() @ x).to(ctx.dtype) if ctx.needs_input_grad[2] else None
        to_b = (gradient.t() @ hidden).mul_(ctx.scaling).to(ctx.dtype) if ctx.needs_input_grad[3] else None
        return gradient, to_x, to_a, to_b, None
