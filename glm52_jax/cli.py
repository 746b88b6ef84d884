"""`glm52`: a table from subcommand to the function that runs it.

A function is imported when its subcommand is called, so that `glm52 --help` imports no JAX. Errors that a user's input
causes are printed as one sentence, without a traceback, with exit code 2.
"""

from __future__ import annotations

import sys

import click

from glm52_jax.errors import InputError
from glm52_jax.floors import import_ours

COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("infer.commands.chat:chat", "Talk to a checkpoint in the terminal."),
    "convert": ("glm52_jax.checkpoint.commands:convert", "Published checkpoint to Orbax: streaming, resumable."),
    "demo": ("infer.commands.demo:demo", "Make a small checkpoint and take the whole path with it."),
    "export": ("glm52_jax.checkpoint.commands:export", "Converted checkpoint to the published layout again."),
    "generate": ("infer.commands.generate:generate", "Continue a prompt."),
    "inspect": ("glm52_jax.inspect.command:inspect", "Layer plan, parameters, bytes and FLOPs of a model."),
    "plan": ("infer.plan.command:plan", "Compile a step for a slice of TPUs: does it fit, what binds it."),
    "precision": ("glm52_jax.precision.command:precision", "Error of the quantised forms on a checkpoint."),
    "selftest": ("infer.selftest.command:selftest", "Check this machine: kernels, collectives, real widths."),
    "verify": ("glm52_jax.checkpoint.commands:verify", "Compare a converted checkpoint with its source, every value."),
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


@click.command(cls=_Table, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="glm52-jax", prog_name="glm52")
def glm52() -> None:
    """GLM-5.2 in JAX: look at a checkpoint, generate from it, talk to it."""


def main() -> None:
    """Runs `glm52` and turns an `InputError` into its sentence and exit code 2."""
    try:
        glm52(standalone_mode=True)
    except InputError as error:
        click.echo(f"glm52: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
