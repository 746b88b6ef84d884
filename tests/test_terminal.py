"""Names with brackets and colons come out as they are, wherever something is printed."""

import ast
import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.cli import glm52
from glm52_jax.io.terminal import progress_bar, screen, spinner
from tests.checkpoint.builders import random_params, small_config

ROOT = Path(__file__).parents[1]
NAMES = ["out[v2]", "out[/v2]x", "[bold]", ":+1:", ":warning-emoji:"]
FLOORS = ("glm52_jax", "infer", "sharding", "train")


@pytest.mark.parametrize("name", NAMES)
def test_consoles_show_a_name_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, a cell, a title, beside a bar and beside a spinner."""
    console, written = screen(), io.StringIO()
    console.file = written
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name, style="yellow")
    console.print(table)
    assert written.getvalue().count(name) == 4
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal = screen(soft_wrap=True)
    terminal.file = written = io.StringIO()
    with progress_bar(terminal, name) as bar:
        bar.add_task("", total=3)
    with spinner(terminal, name) as now:
        now(name)
    assert name in written.getvalue()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_commands_on_files_show_a_name_as_it_is(name: str, tmp_path: Path) -> None:
    """A conversion into a folder of that name, its check, the way back, and the account of both."""
    source, target, back = tmp_path / "source" / name, tmp_path / name, tmp_path / "back" / name
    source.parent.mkdir(parents=True)
    back.parent.mkdir(parents=True)
    config = small_config(num_hidden_layers=1, indexer_types=("full",), mlp_layer_types=("dense",)).without_mtp()
    write_checkpoint(source, config, random_params(config))

    def said(*arguments: object) -> str:
        result = CliRunner().invoke(glm52, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    assert f"{target}: finished" in said("convert", source, target)
    assert str(source) in said("verify", target, "--against", source)
    assert f"{back}: finished" in said("export", target, back)
    assert name in said("inspect", back)


def test_only_one_module_makes_consoles() -> None:
    """A console made elsewhere would read markup again."""
    makers = {"Console", "Progress", "TextColumn", "from_markup", "status"}
    for path in (path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                assert name not in makers, f"{path}:{node.lineno}: use glm52_jax.io.terminal in place of {name}"
            if isinstance(node, ast.keyword):
                assert node.arg not in ("markup", "emoji"), f"{path}:{node.lineno}"
