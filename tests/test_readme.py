"""The documents keep their word: their Python runs, and every command and target that they name is there."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import jax
import pytest

import glm52_jax
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.cli import COMMANDS, glm52
from glm52_jax.config import BUILT_IN, ModelConfig
from glm52_jax.model import decoder_layer
from glm52_jax.text import write_byte_tokenizer
from tests.checkpoint.builders import random_params

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TO_PASTE = [
    ROOT / "docs" / "tour.md",
    ROOT / "docs" / "generation.md",
]  # whose Python is whole; other pages show parts of programs
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(lines before it, content) of every fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        if fence[1] == language:
            yield text.count("\n", 0, fence.start(2)), fence[2]


def shell_commands(page: Path) -> Iterator[list[str]]:
    """Words of every command in a page: the lines of `sh` blocks, and those behind a `$` in blocks of output."""
    lines = [line for _, text in blocks(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for _, text in blocks(page, "text") for line in text.splitlines() if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word == "|":
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


def small_config() -> ModelConfig:
    """A model like that of `glm52 demo`, but small enough to compile soon."""
    tiny = BUILT_IN["glm-5.2-tiny"]
    return dataclasses.replace(
        tiny,
        num_hidden_layers=4,
        indexer_types=tiny.indexer_types[:4],
        mlp_layer_types=("sparse",) * 4,
        n_routed_experts=4,
    )


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `glm-tiny/bf16` in it, as `glm52 demo glm-tiny` leaves it, but small enough to compile soon."""
    folder, config = tmp_path_factory.mktemp("readme"), small_config()
    checkpoint = folder / "glm-tiny" / "bf16"
    write_checkpoint(checkpoint, config, random_params(dataclasses.replace(config, dtype="float32")))
    write_byte_tokenizer(checkpoint, vocab_size=config.vocab_size)
    return folder


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain kernels, compiled without the costly passes: what a block computes is for other tests to judge."""
    monkeypatch.setattr(decoder_layer, "resolve_backend", lambda *_: "reference")
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("quick_compiler")
def test_python_runs(playground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The blocks of a page run one after another, as a reader would paste them."""
    monkeypatch.chdir(playground)
    for page in TO_PASTE:
        namespace = {"__name__": page.stem}
        for line, code in blocks(page, "python"):
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
    assert "(1, 58, 320) float32\n('full', 'shared') True\n" in capsys.readouterr().out


@EACH_PAGE
def test_commands_are_understood(page: Path) -> None:
    for words in shell_commands(page):
        if words[0] not in ("glm52", ".venv/bin/glm52"):
            continue
        _, name, *rest = words
        command = glm52 if name.startswith("-") else glm52.get_command(click.Context(glm52), name)
        assert command is not None, f"no command {name}"
        try:
            command.make_context(name, [name] if command is glm52 else rest)
        except click.exceptions.Exit:
            pass  # --help and --version end here
        except click.ClickException as error:
            pytest.fail(f"{shlex.join(words)}: {error.format_message()}")


@EACH_PAGE
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {words[1] for words in shell_commands(page) if words[0] == "make"}
    assert named <= set(targets)


def test_every_command_and_public_name_is_described() -> None:
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in COMMANDS if f"`glm52 {name}" not in everything] == []
    assert [name for name in glm52_jax.__all__ if f"`{name}" not in README.read_text(encoding="utf-8")] == []
