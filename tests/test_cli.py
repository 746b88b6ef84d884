"""The command table and the imports behind it."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

import glm52_jax
from glm52_jax.cli import COMMANDS, glm52
from glm52_jax.errors import InputError
from glm52_jax.floors import import_ours

ROOT = Path(__file__).parents[1]


def test_every_command_resolves() -> None:
    context = click.Context(glm52)
    for name in COMMANDS:
        command = glm52.get_command(context, name)
        assert command is not None
        assert command.help


def test_public_names_are_listed_and_resolve() -> None:
    assert {"forward", "generate", "load_params", "trace"} <= set(dir(glm52_jax))
    for name in glm52_jax.__all__:
        assert getattr(glm52_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plan_a_trip'"):
        _ = glm52_jax.plan_a_trip


def test_a_file_that_hides_a_floor_is_named(tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text("")
    code = f"import sys; sys.path.append({str(ROOT)!r}); from glm52_jax.cli import main; sys.argv[1:] = ['chat', 'x']"
    result = subprocess.run(
        [sys.executable, "-c", code + "; main()"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("glm52: the package infer of glm52-jax is hidden by ")
    assert "infer.py" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_our_own_floors_are_found() -> None:
    assert import_ours("infer.sampling").__name__ == "infer.sampling"
    with pytest.raises(InputError, match="hidden by an empty folder"):
        import_ours("no_such_package")
