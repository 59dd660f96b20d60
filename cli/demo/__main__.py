"""`python -m cli.demo`: the main job from an empty data directory; exit code 0 only if all of it held."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.markup import escape

from cli.demo import job as steps
from cli.demo.checks import Checks, line
from cli.demo.command import mint
from cli.demo.job import Job
from cli.demo.plan import Plan
from cli.errors import CliError
from cli.report.plot import plot_rewards
from cli.report.text import print_report
from cli.stack.datadir import VERSION_FILE
from cli.terminal import err, out, write_json

STEPS: tuple[tuple[str, Callable[[Job], None]], ...] = (
    ("the stack", steps.stack_is_up),
    ("SFT on demonstrations", steps.train_sft),
    ("GRPO on its own answers", steps.train_grpo),
    ("what came of it", steps.read_report),
    ("asking with the openai package", steps.ask_policy_and_base),
    ("rolling back and forward", steps.roll_back_and_forward),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cli.demo", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("build/demo"), help="folder for data and report")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    arguments = parser.parse_args()
    folder = arguments.to.resolve()
    job = Job(Plan(), folder / "data")
    seconds: dict[str, float] = {}
    try:
        _fresh(job.data)
        _timed(
            seconds, "mint up", lambda: mint("up", "--detach", "--engine", arguments.engine, "--data", str(job.data))
        )
        for title, step in STEPS:
            out.rule(f"[bold]{escape(title)}", align="left")
            _timed(seconds, title, partial(step, job))
    except (CliError, TimeoutError, OSError) as error:
        job.checks.that("every step ran to its end", False, error)
    except KeyboardInterrupt:
        job.checks.that("every step ran to its end", False, "interrupted")
    finally:
        _timed(seconds, "mint down", lambda: _bring_down(job))
    return _conclude(job, seconds, folder)


def _fresh(data: Path) -> None:
    """An empty data directory; what an interrupted demo left running in it is stopped first."""
    if data.exists():
        if not (data / VERSION_FILE).exists():
            raise CliError(f"{data} is not a data directory of MinT; move it away, or use another --to")
        mint("down", "--now", "--data", str(data))
        shutil.rmtree(data)


def _bring_down(job: Job) -> None:
    try:
        mint("down", "--data", str(job.data))
    except CliError as error:
        job.checks.that("mint down stops the stack", False, error)


def _timed(seconds: dict[str, float], name: str, call: Callable[[], object]) -> None:
    begun = time.monotonic()
    try:
        call()
    finally:
        seconds[name] = round(time.monotonic() - begun, 1)


def _conclude(job: Job, seconds: dict[str, float], folder: Path) -> int:
    checks: Checks = job.checks
    if job.report:
        out.rule("[bold]report", align="left")
        print_report(job.report)
        plot_rewards(job.report, folder / "rewards.png")
    out.print("\n" + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()), markup=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", {**job.report, "checks": checks.as_data(), "stage_seconds": seconds})
    if checks.all_held:
        out.print(f"\nall {len(checks.made)} checks held; report in {folder}/report.json and rewards.png", markup=False)
        return 0
    err.print("\nthese checks did not hold:", markup=False)
    for check in checks.made:
        if not check.held:
            err.print(line(check), markup=False)
    err.print(f"logs: {job.data}/logs/", markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
