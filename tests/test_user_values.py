"""Token ids, counts and seeds that a caller may give, and what is said of those that are none."""

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from glm52_jax.cli import glm52, run
from glm52_jax.config import BUILT_IN
from glm52_jax.inputs.values import SEED, token_batch, token_row, whole_number
from glm52_jax.model.transformer import forward, trace
from glm52_jax.params.init import abstract_params
from sharding.errors import InputError

CONFIG = BUILT_IN["glm-5.2-tiny"]

BATCHES = [
    ([[1, 2], [3]], "tokens has rows of different lengths or types, expected integers [batch, length]"),
    ([[1, [2]]], "tokens has rows of different lengths or types"),
    ([], "tokens has shape (0,) and dtype float64"),
    ([[]], "tokens has shape (1, 0) and dtype float64"),
    (np.zeros((0, 3), np.int32), "tokens has shape (0, 3) and dtype int32"),
    ([1, 2], "tokens has shape (2,) and dtype int64"),
    (5, "tokens has shape () and dtype int64"),
    (np.zeros((1, 1, 1), np.int32), "tokens has shape (1, 1, 1) and dtype int32"),
    ([[1.0, 2.0]], "tokens has shape (1, 2) and dtype float64"),
    ([[True, False]], "tokens has shape (1, 2) and dtype bool"),
    ([[True, 2]], "tokens mixes booleans with other values"),
    ([["a"]], "tokens has shape (1, 1) and dtype <U1"),
    ("text", "tokens has shape () and dtype <U4"),
    (None, "tokens has shape () and dtype object"),
    ({"input_ids": [[1]]}, "tokens has shape () and dtype object"),
    ([[None]], "tokens has shape (1, 1) and dtype object"),
    ([[2**70]], "tokens has shape (1, 1) and dtype object"),
    ([[2**32 + 7]], "tokens holds 4294967303, but the vocabulary has 320 tokens"),
    ([[CONFIG.vocab_size]], "tokens holds 320, but the vocabulary has 320 tokens"),
    ([[-3]], "tokens holds -3, but the vocabulary has 320 tokens"),
    (np.array([[2**63]], np.uint64), "tokens holds 9223372036854775808"),
]
MASKS = [
    ([[1, 1, 1]], "mask has shape (1, 3), expected that of tokens, (1, 2)"),
    ([1, 1], "mask has shape (2,), expected that of tokens, (1, 2)"),
    ([[1], [1, 2]], "mask has rows of different lengths or types"),
    ([[0.0, float("-inf")]], "mask has dtype float64 or other values than 0 and 1"),
    ([["yes", "no"]], "mask has dtype <U3 or other values"),
    ([[1, 2]], "mask has dtype int64 or other values than 0 and 1"),
]


@pytest.mark.parametrize("function", [forward, trace])
@pytest.mark.parametrize(
    ("tokens", "mask", "said"), [*((t, None, s) for t, s in BATCHES), *(([[1, 2]], m, s) for m, s in MASKS)]
)
def test_wrong_texts_are_refused_in_a_sentence(function: Any, tokens: Any, mask: Any, said: str) -> None:
    """Before anything is traced: there are no parameters behind these shapes."""
    with pytest.raises(InputError) as error:
        function(abstract_params(CONFIG), CONFIG, tokens, mask)
    assert str(error.value).startswith(said)


def test_what_a_mask_leaves_out_may_be_any_id() -> None:
    tokens, mask = token_batch([[-100, 5, 2**40]], [[0, 1, 0]], 320)
    assert tokens.tolist() == [[0, 5, 0]]
    assert mask.tolist() == [[False, True, False]]
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)


@given(
    st.one_of(st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers()), st.binary(), st.fractions())
)
def test_nothing_but_an_integer_is_a_whole_number(value: Any) -> None:
    with pytest.raises(InputError, match="expected an integer of at least 0"):
        whole_number(value, "it")


@given(st.integers(), st.sampled_from([int, np.int8, np.uint16, np.int64]))
def test_integers_within_their_limits_are(value: int, kind: Any) -> None:
    try:
        given_ = kind(value)
    except OverflowError:
        return
    if 0 <= value <= 100:
        assert whole_number(given_, "it", 0, 100) == value
    else:
        with pytest.raises(InputError, match="expected an integer from 0 to 100"):
            whole_number(given_, "it", 0, 100)


@given(st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=2)), min_size=1))
def test_a_row_is_token_ids_or_refused(values: list[Any]) -> None:
    good = all(type(value) is int and 0 <= value < 320 for value in values)
    try:
        assert token_row(values, 320, "prompt 1").tolist() == values
        assert good
    except InputError:
        assert not good


@pytest.mark.parametrize("text", ["-1", "4294967296", "1" * 5000, "1.0", "nan", "abc", ""])
@pytest.mark.parametrize("command", ["generate", "chat", "demo", "precision"])
def test_wrong_seeds_are_refused_before_all_else(command: str, text: str) -> None:
    result = CliRunner().invoke(glm52, [command, *([] if command == "demo" else ["nowhere"]), "--seed", text])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("--seed is ")
    assert str(result.exception).endswith("expected an integer from 0 to 4294967295")


def test_a_seed_in_an_option() -> None:
    @click.command
    @click.option("--seed", type=SEED, default=0)
    def command(seed: int) -> None:
        click.echo(seed)

    assert CliRunner().invoke(command, ["--seed", "4294967295"]).output == "4294967295\n"


DIGITS = "9" * 5000
HUGE = [
    ["generate", "x", "y", "--top-k", "9" * 30],
    ["generate", "x", "y", "-n", DIGITS],
    ["generate", "x", "y", "--start-timeout", DIGITS],
    ["inspect", "glm-5.2", "--context", DIGITS],
    ["inspect", "glm-5.2", "--batch", DIGITS],
    ["plan", "glm-5.2", "--topology", "v5e:2x2", "--context", DIGITS],
    ["plan", "glm-5.2", "--topology", f"v5e:{DIGITS}x2"],
    ["plan", "glm-5.2", "--topology", "v5e:2x2", "--layout", f"data={DIGITS}"],
    ["precision", "x", "--length", DIGITS],
    ["convert", "x", "y", "--unit-size", DIGITS],
    ["convert", "x", "y", "--layers", f"0-{DIGITS}"],
    ["convert", "x", "y", "--process", f"1/{DIGITS}"],
    ["export", "x", "y", "--shard-size", f"{DIGITS}GB"],
    ["verify", "x", "--against", "y", "--layers", DIGITS],
    ["selftest", "--cpu-devices", "1000000"],
]


@pytest.mark.parametrize("arguments", HUGE, ids=lambda arguments: f"{arguments[0]} {arguments[-2]}")
def test_numbers_of_thousands_of_digits_are_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Python refuses to read them as integers, and floats have no such values."""
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("glm52: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize(("place", "why"), [("gs://bucket/x", "is an address"), ("a\udcff", "the name is not UTF-8")])
def test_a_destination_is_a_folder_here(
    command: str, place: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a folder named gs: in the working directory, which Orbax would not open at the end of the conversion."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(glm52, [command, "source", place])
    assert isinstance(result.exception, InputError)
    assert why in str(result.exception)
    assert not list(tmp_path.iterdir())
