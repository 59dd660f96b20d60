"""The reward curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_rewards(report: dict[str, Any], path: Path) -> bool:
    """One line per run that sampled, written as PNG. False when no run of the report has rewards."""
    curves = []
    for run in report["runs"]:
        points = [(step["step"], step["reward"]) for step in run["steps"] if step.get("reward") is not None]
        if points:
            curves.append((f"{run['policy']} {run['method']} {run['run_id'][:8]}", points))
    if not curves:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in curves:
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the step's samples")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
