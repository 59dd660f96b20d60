"""What a result must prove before it is committed: that it answers the command that was given.

Pure. Each check returns None, or the reason for which the run fails: a worker that sampled with another
revision, trained to no effect or exported another adapter would be wrong again on a retry.
"""

from __future__ import annotations

import math

from mint_schemas.commands import Command, EvaluationRequested, ExportRequested, RolloutRequested, UpdateRequested

from shared.adapters import layout
from shared.catalog.api import EvaluationResult, ExportResult, Result, RolloutResult, UpdateResult

CHECKPOINT_FILES = ("adapter.safetensors", "state.json")


def fault_in(command: Command, result: Result, base_sha256: str) -> str | None:
    match command, result:
        case RolloutRequested(), RolloutResult():
            return _rollout(command, result)
        case UpdateRequested(), UpdateResult():
            return _update(command, result)
        case ExportRequested(), ExportResult():
            return _export(command, result, base_sha256)
        case EvaluationRequested(), EvaluationResult():
            return _evaluation(command, result)
    return f"{command.command_id} asks for a result of kind {command.kind}, not {result.kind}"


def _rollout(command: RolloutRequested, result: RolloutResult) -> str | None:
    if (result.revision, result.adapter_sha256) != (command.revision, command.adapter_sha256):
        return (
            f"the rollout of step {command.step} was sampled with {_ran(result.revision, result.adapter_sha256)}, "
            f"the step needs {_ran(command.revision, command.adapter_sha256)}"
        )
    if not math.isfinite(result.reward_mean):
        return f"the rollout of step {command.step} has a mean reward of {result.reward_mean}"
    return None


def _update(command: UpdateRequested, result: UpdateResult) -> str | None:
    if result.checkpoint.step != command.step:
        return (
            f"the update of step {command.step} answered with the training checkpoint of step {result.checkpoint.step}"
        )
    missing = [name for name in CHECKPOINT_FILES if name not in result.checkpoint.files]
    if missing:
        return f"the training checkpoint of step {command.step} lacks {', '.join(missing)}"
    wrong = sorted(name for name, value in result.metrics.items() if not math.isfinite(value))
    if wrong:
        shown = ", ".join(f"{name}={result.metrics[name]}" for name in wrong)
        return f"step {command.step} computed numbers that are not finite: {shown}; a lower learning rate may help"
    gradient = result.metrics.get("grad_norm", 0.0)
    # A schedule may rest at 0; the method's rate stands in where the worker does not say.
    rate = result.metrics.get("learning_rate", command.method.optimizer.learning_rate)
    if not result.skipped and not result.adapter_changed and rate > 0 and gradient > 0:
        return (
            f"step {command.step} left the adapter's bytes unchanged although its learning rate is {rate:g} "
            f"and its gradient norm {gradient:g}; the optimizer step was lost"
        )
    return None


def _export(command: ExportRequested, result: ExportResult, base_sha256: str) -> str | None:
    manifest, lora = result.content, command.lora
    expected: dict[str, object] = {
        "policy": command.policy,
        "base": command.base,
        "base_sha256": base_sha256,
        "run_id": command.run_id,
        "step": command.step,
        "parent": command.parent,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            return f"the export of step {command.step} has {name} {getattr(manifest, name)!r}, expected {value!r}"
    if sorted(manifest.target_modules) != sorted(lora.target_modules):
        return (
            f"the export of step {command.step} has target modules {sorted(manifest.target_modules)}, "
            f"expected {sorted(lora.target_modules)}"
        )
    if set(manifest.files) != {layout.CONFIG_FILE, layout.TENSOR_FILE}:
        return f"the export of step {command.step} has the files {sorted(manifest.files)}"
    combined = layout.adapter_sha256({name: ref.sha256 for name, ref in manifest.files.items()})
    if combined != manifest.adapter_sha256:
        said = manifest.adapter_sha256
        return f"the export of step {command.step} says adapter_sha256 {said}, its files give {combined}"
    return None


def _evaluation(command: EvaluationRequested, result: EvaluationResult) -> str | None:
    if (result.revision, result.adapter_sha256) != (command.revision, command.adapter_sha256):
        return (
            f"the evaluation scored {_ran(result.revision, result.adapter_sha256)}, "
            f"it was asked to score {_ran(command.revision, command.adapter_sha256)}"
        )
    if not math.isfinite(result.score) or result.items < 1:
        return f"the evaluation of {_ran(result.revision, None)} gave {result.score} over {result.items} items"
    return None


def _ran(revision: str | None, adapter_sha256: str | None) -> str:
    digest = f" (adapter {adapter_sha256[:12]}…)" if adapter_sha256 else ""
    return f"{revision or 'the base model'}{digest}"
