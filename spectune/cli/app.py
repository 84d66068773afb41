"""The door for people: registers the commands and turns every failure into text and an exit code.

0 done · 1 runtime failure · 2 usage or bad input · 3 a check failed · 4 inconclusive ·
5 not comparable · 6 metric missing · 7 done, with failed points · 130 interrupted
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from spectune import __version__
from spectune.cli import (
    compare,
    config,
    doctor,
    engines,
    gate,
    import_,
    mock_server,
    policy,
    profile,
    report,
    sweep,
    theory,
    trace,
    train,
    tune,
    verify,
    workload,
)
from spectune.cli.console import say, say_error, write_log
from spectune.errors import SpectuneError

INTERRUPTED = 130
USAGE = 2
ENGINE_PACKAGES = ("torch", "safetensors", "tokenizers", "gguf", "jinja2")

app = typer.Typer(
    name="spectune",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog="Example: spectune sweep --quick")(sweep.sweep)
app.command(
    epilog="Example: spectune trace --num-prompts 8 --max-tokens 64 --output-dir runs/trace",
    no_args_is_help=False,
)(trace.trace)
app.command(
    epilog="Example: spectune profile --batch-size 1,4 --output-dir runs/profile", no_args_is_help=False
)(profile.profile)
app.command(epilog="Example: spectune tune --quick", no_args_is_help=False)(tune.tune)
app.command(epilog="Example: spectune report runs/2026-11-30-101500")(report.report)
app.command(
    epilog="Example: spectune doctor path/to/head --model path/to/model --engine vllm", no_args_is_help=False
)(doctor.doctor)
app.command(name="import", epilog="Example: spectune import results/demo")(import_.import_)
app.command(
    name="mock-server", epilog="Example: spectune mock-server --port 8000 --num-tokens 3 --step-ms 10"
)(mock_server.mock_server)
app.command(epilog="Example: spectune compare runs/before runs/after")(compare.compare)
app.command(
    epilog="Example: spectune verify --num-tokens 3 --batch-size 1,4 --num-prompts 16", no_args_is_help=False
)(verify.verify)
app.add_typer(gate.app, name="gate")
app.add_typer(theory.app, name="theory")
app.add_typer(policy.app, name="policy")
app.add_typer(train.app, name="train")
app.add_typer(config.app, name="config")
app.add_typer(workload.app, name="workload")
app.add_typer(engines.app, name="engines")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"spectune {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: spectune sweep --quick")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Should this deployment speculate, with which settings, and at which load?

    Measures real decoding with and without speculation, explains the numbers, decides, and writes what
    the serving engine executes.
    """


def main() -> None:
    """Entry point of the command `spectune`."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code, never a traceback."""
    try:
        command = typer.main.get_command(app)
        code = command.main(list(argv), prog_name="spectune", standalone_mode=False, obj=tuple(argv))
        return code if isinstance(code, int) else 0
    except SpectuneError as error:
        say_error(error.message, error.hint)
        return error.exit_code
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED
    except typer.TyperException as error:
        return _say_usage(error)
    except BrokenPipeError:
        # The reader of our output has gone; what it wanted it has. Keeps Python's exit flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        package = str(getattr(error, "name", None)).split(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in ENGINE_PACKAGES:
            say_error(f"this needs the package {package}", "pip install 'spectune[engine]'")
            return USAGE
        log = write_log(error)
        say_error(f"unexpected {type(error).__name__}: {error}", f"the traceback is in {log}")
        return SpectuneError.exit_code


def _say_usage(error: typer.TyperException) -> int:
    """Wrong flags and arguments; a bare group prints its help instead."""
    context = getattr(error, "ctx", None)
    message = getattr(error, "format_message", lambda: str(error))()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return USAGE
    command = context.command_path if context is not None else "spectune"
    say_error(message[:1].lower() + message[1:].rstrip("."), f"{command} --help")
    return USAGE
