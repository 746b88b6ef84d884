"""Whatever is known from config, tokenizer and arguments is refused before a weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from glm52_jax.cli import glm52
from infer import memory_check
from infer.commands import session
from sharding.errors import InputError

Edit = Callable[[Path], object]


def config(**changes: Any) -> Edit:
    return json_file("config.json", changes)


def generation(**changes: Any) -> Edit:
    return json_file("generation_config.json", changes)


def json_file(name: str, changes: dict[str, Any]) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return edit


def template(text: str) -> Edit:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def unchanged(_: Path) -> None:
    pass


@pytest.fixture
def refusal(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The sentence that a command ends with on an edited copy of the checkpoint, with loading forbidden."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(session, "load_with_report", forbidden)

    def run(edit: Edit, command: str, *arguments: str, stdin: str | None = "Hello\n") -> str:
        folder = tmp_path / "copy"
        shutil.copytree(checkpoint, folder)
        edit(folder)
        result = CliRunner().invoke(glm52, [command, str(folder), *arguments], input=stdin)
        if result.exit_code == 2 and isinstance(result.exception, SystemExit):
            return result.stderr
        assert isinstance(result.exception, InputError), result.exception
        assert "\n" not in str(result.exception)
        return str(result.exception)

    return run


EVERY_COMMAND: list[tuple[Edit, tuple[str, ...], str]] = [
    (config(num_nextn_predict_layers=0), ("--draft-tokens", "3"), "no MTP layer to draft with"),
    (unchanged, ("--draft-tokens", "9"), "--draft-tokens"),
    (unchanged, ("-n", "5000"), "more than the 4096 positions of the model (max_position_embeddings)"),
    (config(max_position_embeddings=6), ("-n", "6"), "more than the 6 positions"),
    (unchanged, ("--stop", ""), "stop"),
    (unchanged, ("--stop", "a", "--stop", "b", "--stop", "c", "--stop", "d", "--stop", "e"), "stop"),
    (unchanged, ("--chunk", "0"), "--chunk is 0, expected at least 1"),
    (unchanged, ("--top-k", "-1"), "--top-k"),
    (unchanged, ("--top-p", "0"), "top_p is 0.0"),
    (unchanged, ("--temperature", "-1"), "temperature is -1.0"),
    (unchanged, ("--layout", "nonsense"), "nonsense"),
    (unchanged, ("--layout", "expert=64"), "devices"),
    (unchanged, ("--kv", "fp4"), "--kv"),
    (config(eos_token_id=[320]), (), "config.json: eos_token_id holds 320, but the vocabulary has 320 tokens"),
    (generation(eos_token_id=4000), (), "generation_config.json: eos_token_id holds 4000"),
    (generation(temperature="hot"), (), "temperature is 'hot'"),
    (config(hidden_size=32), (), "has shape"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), (), "tokenizer.json"),
]


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)], ids=lambda c: c[0])
@pytest.mark.parametrize(("edit", "arguments", "sentence"), EVERY_COMMAND)
def test_before_any_weight(
    refusal: Callable[..., str], command: tuple[str, ...], edit: Edit, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refusal(edit, *command, *arguments)


@pytest.mark.parametrize(
    ("edit", "command", "sentence"),
    [
        (unchanged, ("generate", ""), "prompt 1 is empty, expected at least one token"),
        (unchanged, ("generate", "a", "b", ""), "prompt 3 is empty"),
        (unchanged, ("generate", "-"), "prompt 1 is empty"),
        (unchanged, ("generate", "a", "x" * 4090, "-n", "10"), "prompt 2 has 4090 tokens and max_new_tokens is 10"),
        (unchanged, ("generate", "a", "--profile", "{folder}/config.json/trace"), "--profile"),
        (template("{% for m in messages %}"), ("chat",), "chat template that does not compile"),
        (template("{{ messages[0].nothing.at_all }}"), ("chat",), "fails on a sample conversation"),
        (template("Hello"), ("chat",), "leaves out the user's text"),
        (unchanged, ("chat", "--system", "x" * 4000), "prompt 1 has"),
    ],
)
def test_what_one_command_is_asked(
    refusal: Callable[..., str], tmp_path: Path, edit: Edit, command: tuple[str, ...], sentence: str
) -> None:
    arguments = [argument.replace("{folder}", str(tmp_path / "copy")) for argument in command]
    assert sentence in refusal(edit, *arguments, stdin="")


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)], ids=lambda c: c[0])
def test_what_can_never_fit(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(memory_check, "_host_memory", lambda: 10**6)
    sentence = refusal(unchanged, *command)
    assert "the weights take" in sentence
    assert "more than the 1.00 MB of memory that this host has" in sentence
