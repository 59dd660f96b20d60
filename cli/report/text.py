"""A report for people."""

from __future__ import annotations

from typing import Any

from cli.terminal import out, print_table


def print_report(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        out.print(f"\n[bold]{run['method']}[/bold] run {run['run_id']}: {run['state']}")
        if run["outcome"]:
            out.print(f"  {run['outcome']}", markup=False)
        _print_steps(run)
    out.print("\n[bold]held-out scores[/bold]")
    rows = [
        (it["revision"] or f"{it['base']} (base)", f"{it['score']:.3f}", it["items"], it["scorer"])
        for it in report["scores"]
    ]
    print_table(("what", "score", "items", "scorer"), rows)
    _print_times(report)
    out.print("\n[bold]lineage[/bold]")
    links = [
        (it["revision"], it["parent"], it["step"], it["adapter_sha256"][:12], ", ".join(it["aliases"]))
        for it in report["lineage"]
    ]
    print_table(("revision", "parent", "step", "adapter", "aliases"), links)
    _print_adapter(report["adapter"])


def _print_steps(run: dict[str, Any]) -> None:
    rows = [
        (
            step["step"],
            _number(step.get("reward"), 3),
            _number(step.get("loss"), 4),
            step.get("sampled_by") or ("base" if "reward" in step else None),
            _bar(step.get("reward")),
        )
        for step in run["steps"]
    ]
    print_table(("step", "reward", "loss", "sampled by", ""), rows)


def _print_times(report: dict[str, Any]) -> None:
    out.print("\n[bold]seconds per stage[/bold]")
    stages = list(dict.fromkeys(name for run in report["runs"] for name in run["seconds"]))
    rows = [
        (run["method"], *[_number(run["seconds"].get(name), 1) for name in stages], _number(run["wall_seconds"], 1))
        for run in report["runs"]
    ]
    print_table(("run", *stages, "all"), rows)


def _print_adapter(adapter: dict[str, Any]) -> None:
    size = f"\nadapter: {adapter['bytes'] / 1e6:.2f} MB"
    if adapter["share"] is not None:
        size += f", {adapter['share']:.2%} of the base model's {adapter['base_bytes'] / 1e6:.0f} MB"
    out.print(size, markup=False)


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _bar(value: float | None) -> str:
    return "" if value is None else "█" * round(max(0.0, min(1.0, value)) * 30)
