"""Rows without padding: their tokens end to end in one sequence, attention within each row.

`packed` names the rows' lengths for the forward passes inside it; the attention function that bases are
loaded with then attends row by row, so that a row's result does not depend on what it is packed with.
Outside, the same function is PyTorch's scaled dot product attention, masks and all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shared.errors import Fatal

_log = logging.getLogger(__name__)

PACKED_ATTENTION = "mint_packed"
_LENGTHS: ContextVar[Sequence[int] | None] = ContextVar("row_lengths", default=None)
# what some architectures add to attention and this one would silently leave out
_UNKNOWN = ("softcap", "s_aux", "position_bias")
# layers of other kinds (chunked, linear) see rows in ways that this attention is not told of
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@contextmanager
def packed(lengths: Sequence[int]) -> Iterator[None]:
    """Inside, a batch [1, Σ lengths] is so many rows. Near lengths should stand side by side."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, H, N, D] and key, value [1, K, N, D], H a multiple of K → [1, N, H, D].

    Rows of one length stand side by side and are attended to as one batch."""
    lengths = _LENGTHS.get()
    if lengths is None:
        answer: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return answer
    given = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if given:
        raise Fatal(f"attention with {', '.join(given)} cannot be packed; set MINT_LEARNER_PACKING=false")
    shared = query.shape[1] != key.shape[1]
    groups = [(length, len(list(rows))) for length, rows in groupby(lengths)]
    stretches = [count * length for length, count in groups]
    parts = (tensor[0].split(stretches, dim=1) for tensor in (query, key, value))
    pieces = []
    for (length, count), *qkv in zip(groups, *parts, strict=True):
        q, k, v = (tensor.unflatten(1, (count, length)).transpose(0, 1) for tensor in qkv)
        window = kwargs.get("sliding_window")
        mask = _window(length, window, q.device) if window is not None and window < length else None
        attended = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=kwargs.get("scaling"), enable_gqa=shared
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0), None


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length], true where key j is one of the `window` newest that query i may see."""
    behind = torch.arange(length, device=device)
    distance = behind[:, None] - behind[None, :]
    return (distance >= 0) & (distance < window)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _LENGTHS.get() is not None else sdpa_mask(*args, **kwargs)


@torch.no_grad()
def pack_attention(module: Any) -> bool:
    """Give a loaded base the packed attention, if two packed rows then come out as each does alone; else
    leave it as it was. False for attention that cannot be exchanged or has parts that are not known here."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds or getattr(config, "attention_chunk_size", None) or not module._supports_attention_backend:
        return False
    own = module.config._attn_implementation
    rows = [torch.arange(3, 8), torch.arange(9, 12)]
    alone = torch.cat([module(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    module.set_attn_implementation(PACKED_ATTENTION)
    try:
        with packed([len(row) for row in rows]):
            together = module(
                input_ids=torch.cat(rows)[None],
                position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
                use_cache=False,
            ).logits[0]
    except Exception as error:
        _log.info("rows are padded, since packing them fails: %s", error)
    else:
        largest = float((together.double().log_softmax(-1) - alone.double().log_softmax(-1)).abs().max())
        if largest <= (0.5 if alone.dtype == torch.bfloat16 else 1e-3):
            return True
        _log.info("rows are padded: packed, a row's logprobs differ by %.2g from what it has alone", largest)
    module.set_attn_implementation(own)
    return False


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)
