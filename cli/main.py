"""The `mint` command: which commands there are, and how a failure looks."""

from __future__ import annotations

import sys

import typer

from cli import data_commands, key_commands, look_commands, policy_commands, run_commands, stack_commands
from cli.errors import FAILED, CliError
from cli.terminal import err
from shared.errors import MintError

app = typer.Typer(
    name="mint",
    help="Train and serve many small policies over a few resident base models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(help="One run.", no_args_is_help=True)
data_app = typer.Typer(help="Your own data.", no_args_is_help=True)
key_app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
base_app = typer.Typer(help="Your own base models.", no_args_is_help=True)

for command in (
    stack_commands.up,
    stack_commands.down,
    stack_commands.status,
    run_commands.train,
    run_commands.runs,
    run_commands.cancel,
    run_commands.evaluate,
    policy_commands.policies,
    policy_commands.revisions,
    policy_commands.alias,
    policy_commands.pin,
    policy_commands.rollback,
    policy_commands.chat,
    look_commands.rollouts,
    data_commands.report,
):
    app.command()(command)
run_app.command("show")(look_commands.run_show)
run_app.command("watch")(look_commands.run_watch)
run_app.command("plot")(look_commands.run_plot)
run_app.command("metrics")(look_commands.run_metrics)
data_app.command("put")(data_commands.put)
key_app.command("create")(key_commands.create)
key_app.command("list")(key_commands.list_keys)
key_app.command("revoke")(key_commands.revoke)
base_app.command("add")(stack_commands.base_add)
app.add_typer(run_app, name="run")
app.add_typer(data_app, name="data")
app.add_typer(key_app, name="key")
app.add_typer(base_app, name="base")


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 bad input, 3 nothing answers, 130 interrupted."""
    try:
        app()
    except CliError as error:
        _fail(str(error), error.code)
    except MintError as error:
        _fail(str(error), FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    err.print(f"error: {message}", markup=False)
    sys.exit(code)
