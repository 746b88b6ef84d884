"""The generating commands as a user runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from glm52_jax.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors
from glm52_jax.cli import glm52
from glm52_jax.text import Tokenizer
from infer.commands.session import Session, stream_texts
from infer.generate import STOP, Generation, generate
from sharding.errors import InputError
from tests.infer.conftest import CONFIG


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(glm52, list(arguments), input=stdin, catch_exceptions=True)


@pytest.mark.quick(1)
def test_generate_prints_the_text_and_the_figures(checkpoint: Path, params: dict) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    expected = generate(params, CONFIG, [tokenizer.encode("Hello, you")], 12, stop_ids=())[0]
    for drafts in ("3", "0"):
        result = run("generate", str(checkpoint), "Hello, you", "-n", "12", "--ignore-eos", "--draft-tokens", drafts)
        assert result.exit_code == 0, result.output
        assert result.stdout == tokenizer.decode(expected) + "\n"
        assert "12 new" in result.stderr
        assert ("drafts accepted" in result.stderr) == (drafts == "3")
    piped = run("generate", str(checkpoint), "-", "-n", "12", "--ignore-eos", stdin="Hello, you")
    assert piped.stdout == result.stdout


@pytest.mark.slow
def test_generate_takes_several_prompts_and_traces_its_steps(checkpoint: Path, tmp_path: Path) -> None:
    options = ("-n", "4", "-t", "1", "--seed", "5", "--kv", "fp8", "--profile", str(tmp_path / "trace"))
    result = run("generate", str(checkpoint), "one", "another one", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("--- prompt") == 2
    assert list(tmp_path.glob("trace/**/*.xplane.pb"))


def test_a_stop_string_ends_the_text_before_it(checkpoint: Path, params: dict) -> None:
    """The stop string spans tokens, and nothing of it is shown."""
    tokenizer = Tokenizer.load(checkpoint)
    prompt = tokenizer.encode("Hello, you")
    whole = tokenizer.decode(generate(params, CONFIG, [prompt], 16, stop_ids=())[0])
    stop = whole[5:8]
    generation = Generation(params, CONFIG, [prompt], 16, stop_ids=())
    text = "".join(piece for _, piece in stream_texts(generation, tokenizer, 1, [stop]))
    assert text == whole[: whole.index(stop)]
    assert generation.reasons == [STOP]


def test_chat_reads_lines_and_answers(checkpoint: Path) -> None:
    lines = "hello\n\n/think\nagain\n/new\n/nonsense\nonce more\n/exit\nnever read\n"
    result = run("chat", str(checkpoint), "-n", "5", "--system", "Be brief.", stdin=lines)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("prompt tokens") == 3
    assert "thinking off" in result.stderr
    assert "chat format: " in result.stderr


@pytest.mark.parametrize("generation", [{"do_sample": False}, {"top_k": 1}, {"top_p": 0}, {"temperature": 0}])
def test_chat_takes_the_likeliest_token_where_the_file_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict
) -> None:
    """An option wins over the file; what the file asks for is said."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9} | generation))
    asked = []

    def seen(self: Session, prompts: list, count: int, **options: Any) -> None:
        asked.append((options["temperature"], options["top_k"], options["top_p"]))
        raise InputError("enough")

    monkeypatch.setattr(Session, "generation", seen)
    for options in ((), ("-t", "0.7", "--top-k", "5", "--top-p", "0.5")):
        assert str(run("chat", str(folder), *options, stdin="hello\n").exception) == "enough"
    assert asked[0][0] == 0.0
    assert asked[1] == (0.7, 5, 0.5)


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)], ids=lambda c: c[0])
def test_a_weight_that_is_no_number_ends_the_command(checkpoint: Path, tmp_path: Path, command: tuple) -> None:
    """With drafts too, and a chat does not wait for the next line."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    name, file = "model.layers.2.self_attn.o_proj.weight", folder / "model.safetensors"
    opened = SafetensorsFile(file)
    tensors = {name: np.array(opened.read(name)) for name in opened.entries}
    tensors[name][3, 4] = np.nan
    write_safetensors(file, {n: (t.dtype, t.shape) for n, t in tensors.items()}, tensors.items())
    result = run(command[0], str(folder), *command[1:], "-n", "12", stdin="hello\nagain\n")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("prompt 1: the model's output is NaN or infinite from position 0 on")
    assert result.stdout == "\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "nowhere", "x"], "nowhere: no such folder"),
        (["generate", "CHECKPOINT", ""], "prompt 1 is empty"),
        (["generate", "CHECKPOINT", "x", "-n", "9999"], "max_position_embeddings"),
        (["generate", "CHECKPOINT", "x", "--stop", ""], "stop"),
        (["generate", "CHECKPOINT", "x", "--top-p", "2"], "top_p is 2.0"),
        (["chat", "nowhere"], "nowhere: no such folder"),
        (["demo", "CHECKPOINT"], "not empty"),
    ],
)
def test_wrong_input_is_one_sentence(checkpoint: Path, arguments: list[str], sentence: str) -> None:
    result = run(*[str(checkpoint) if a == "CHECKPOINT" else a for a in arguments])
    assert isinstance(result.exception, InputError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_program_prints_it_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "glm52_jax.cli", "generate", str(tmp_path), "x"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("glm52: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_demo_takes_the_whole_path(tmp_path: Path) -> None:
    result = run("demo", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.output
    assert "with and without drafts: the same tokens" in result.output
    assert "largest difference 0.0" in result.output
