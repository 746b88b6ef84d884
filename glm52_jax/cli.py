"""`glm52`: a table from subcommand to the function that runs it.

A function is imported when its subcommand is called, so that `glm52 --help` imports no JAX. Errors that a user's input
or the machine causes are printed as one sentence, without a traceback, with exit code 2.
"""

from __future__ import annotations

import contextlib
import sys

import click

from glm52_jax.io.streams import STDOUT_NAME, finish, secure_streams
from glm52_jax.own_imports import import_ours
from sharding.errors import InputError, printable, sentence

FAILED, INTERRUPTED, READER_LEFT = 2, 130, 1
"""Exit codes of a command that could not do its work, that Ctrl-C ended, whose output nobody reads to its end."""

COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("infer.commands.chat:chat", "Talk to a checkpoint in the terminal."),
    "convert": ("glm52_jax.checkpoint.commands:convert", "Published checkpoint to Orbax: streaming, resumable."),
    "demo": ("infer.commands.demo:demo", "Make a small checkpoint and take the whole path with it."),
    "export": ("glm52_jax.checkpoint.commands:export", "Converted checkpoint to the published layout again."),
    "generate": ("infer.commands.generate:generate", "Continue a prompt."),
    "inspect": ("glm52_jax.inspect.command:inspect", "Layer plan, parameters, bytes and FLOPs of a model."),
    "plan": ("infer.planning.command:plan", "Compile a step for a slice of TPUs: does it fit, what binds it."),
    "precision": (
        "glm52_jax.verification.precision_command:precision",
        "Error of the quantised forms on a checkpoint.",
    ),
    "selftest": ("infer.selftest.command:selftest", "Check this machine: kernels, collectives, real widths."),
    "verify": ("glm52_jax.verification.command:verify", "Compare a converted checkpoint with its source, every value."),
}


class _Table(click.Group):
    """A group whose commands are named by `COMMANDS` and imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(":")
        return getattr(import_ours(module), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        wrong = next((argument for argument in args if "\0" in argument), None)
        if wrong is not None:
            raise InputError(f"the argument {wrong!r} holds a NUL byte, expected text without one")
        return super().parse_args(ctx, args)


@click.command(cls=_Table, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="glm52-jax", prog_name="glm52")
def glm52() -> None:
    """GLM-5.2 in JAX: look at a checkpoint, generate from it, talk to it."""


def main() -> None:
    """Runs `glm52` and exits; what a user's input or the machine causes is one sentence on standard error."""
    secure_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line and returns its exit code; only faults of the program raise."""
    code = _code(arguments)
    try:
        heard = finish()
    except OSError as error:
        return code or _failed(error)
    return code or (0 if heard else FAILED)


def _code(arguments: list[str]) -> int:
    try:
        return glm52.main(arguments, prog_name="glm52", standalone_mode=False) or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            _say(end.code)
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    except click.Abort as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted()
        _say("standard input ended, expected an answer")
        return FAILED
    except KeyboardInterrupt:
        return _interrupted()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _say(_of_click(error))
        return error.exit_code
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    if isinstance(error, BrokenPipeError) and error.filename in (None, STDOUT_NAME):
        return READER_LEFT
    said = sentence(error)
    if said is None:
        raise error
    _say(said)
    return FAILED


def _interrupted() -> int:
    _say("interrupted")
    return INTERRUPTED


def _say(text: str | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"glm52: {text}", file=sys.stderr, flush=True)


def _of_click(error: click.ClickException) -> str:
    """A wrong command line, and which help says what is right."""
    context = getattr(error, "ctx", None)
    text = printable(" ".join(error.format_message().split("\n"))).removesuffix(".")
    return f"{text} (see {context.command_path} --help)" if context is not None else text


if __name__ == "__main__":
    main()
