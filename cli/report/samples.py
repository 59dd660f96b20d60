"""What a step learned from, for people: each sample's figures on a line, its texts below."""

from __future__ import annotations

from typing import Any

from cli.report.chart import number
from cli.terminal import out

TEXT_LINES = 12


def print_samples(page: dict[str, Any]) -> None:
    """Texts are printed as they are, control characters apart; long ones are shortened (--json has more)."""
    for line in sample_lines(page):
        out.print(line, markup=False)


def sample_lines(page: dict[str, Any]) -> list[str]:
    record = "" if page["record_step"] == page["step"] else f" (record of step {page['record_step']})"
    mean = "" if page["reward_mean"] is None else f", mean reward {number(page['reward_mean'])}"
    lines = [
        f"step {page['step']}{record}: {page['total']} samples of {page['groups']} prompts{mean}, "
        f"by {page['revision'] or 'the base'} at temperature {number(page['temperature'])}"
    ]
    last_prompt = None
    for item in page["items"]:
        if item["group"] != last_prompt:
            lines += ["", *_text(f"prompt {item['group'] + 1}", item["prompt"])]
            lines += _text("answer", item["answer"]) if item["answer"] else []
            last_prompt = item["group"]
        lines += [_figures(item), *_text("", item["completion"])]
    shown = len(page["items"])
    if page["next_cursor"] is not None:
        lines += ["", f"… {page['total'] - shown} more; --limit shows them"]
    return lines


def _figures(item: dict[str, Any]) -> str:
    advantage = "–" if item["advantage"] is None else f"{item['advantage']:+.3f}"
    cut = "  (texts cut)" if item["text_cut"] else ""
    return (
        f"  #{item['sample'] + 1:<3} reward {item['reward']:.3f}  advantage {advantage}  "
        f"{item['tokens']} tokens  {item['finish_reason']}{cut}"
    )


def _text(label: str, text: str) -> list[str]:
    """Indented under its label, which stands before the first line."""
    rows = _printable(text.rstrip("\n")).split("\n")
    if len(rows) > TEXT_LINES:
        rows = [*rows[:TEXT_LINES], f"… {len(rows) - TEXT_LINES} more lines"]
    indent = 10 if label else 7
    head = f"{label:{indent}}" if label else " " * 5 + "│ "
    rest = " " * indent if label else head
    return [f"{head if place == 0 else rest}{row}".rstrip() for place, row in enumerate(rows)]


def _printable(text: str) -> str:
    """A completion is whatever a policy said: escape sequences must not reach the terminal."""
    return "".join(char if char == "\n" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)
