"""A base model in pieces: each process of a group keeps its share of every frozen tensor (FSDP2).

A loaded module goes in; the same module comes out, whose decoder layers gather their weights when they
run, forward and backward, and give them up again. Invariant: no sharded tensor trains, so nothing is
ever reduced here: the gradients of adapters are added up by `Peers.sum_`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shared.errors import Fatal

__all__ = ["shard", "whole"]


def shard(module: nn.Module, mesh: DeviceMesh, targets: Iterable[str]) -> None:
    """In place; the shards are on the mesh's device. `targets`: names of the layers that adapters go to.

    Layers gather their weights together, in all processes, whichever rows each has. On the way back a
    layer gathers only when a gradient passes through it, so two policies of one joint pass must reach
    equally deep: raises Fatal for a base where some target first occurs in a later layer than another."""
    layers = _decoder_layers(module)
    depths = {name: _first_with(layers, name) for name in targets}
    depths = {name: depth for name, depth in depths.items() if depth is not None}
    if len(set(depths.values())) > 1:
        raise Fatal(
            f"the first layers with each adapter target differ: {depths}; over several processes they must be one. "
            "Leave targets out of the base's target_modules"
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; of one that is, all processes must ask together."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The blocks that the architecture says are never split, in order."""
    names = frozenset(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]


def _first_with(layers: list[nn.Module], target: str) -> int | None:
    for depth, layer in enumerate(layers):
        for path, part in layer.named_modules():
            if isinstance(part, nn.Linear) and path.rsplit(".", 1)[-1] == target:
                return depth
    return None
