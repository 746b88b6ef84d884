"""`glm52 precision`: the table of errors of the quantised forms on a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from rich.table import Table

from glm52_jax.config import ModelConfig, load_config
from glm52_jax.inputs.lengths import LENGTH
from glm52_jax.inputs.values import SEED, token_batch
from glm52_jax.io.terminal import screen, spinner
from sharding.errors import InputError

if TYPE_CHECKING:
    from glm52_jax.verification.quantization_error import QuantizationError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="A text to run, for the tokenizer.")
@click.option(
    "--tokens",
    "token_file",
    help="Token ids to run: a .npy or .npz file (there `input_ids` and `attention_mask`); a relative name is looked "
    "for in the checkpoint first.",
)
@click.option("--length", type=LENGTH, help="Tokens of each of two random texts.  [default: index_topk + 128]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the random texts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def precision(
    checkpoints: tuple[Path, ...],
    text_file: Path | None,
    token_file: str | None,
    length: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Error of the quantised forms of weights and cache, on a checkpoint that fits here.

    The plain float32 model runs the texts, then the model with one thing quantised after another: weights in BF16, FP8
    and INT8 blocks, latent rows and index keys in FP8. Without --text or --tokens the texts are random.

    "One layer" is the relative error of what a layer adds to the stream, given the plain model's; "whole model" that of
    the logits when all layers run so. "sets" are selections that are the same, "kept" the share of their positions.
    """
    if text_file is not None and token_file is not None:
        raise InputError("--text and --tokens are both given, expected one of them")
    given: dict[Path, tuple[ModelConfig, np.ndarray, np.ndarray]] = {}
    for folder in checkpoints:  # all of them are checked before the first is loaded
        config = load_config(folder)
        if text_file is not None:
            given[folder] = config, *_from_text(folder, config, text_file)
        elif token_file is not None:
            given[folder] = config, *_from_file(folder, config, token_file)
        else:
            given[folder] = config, *_random(config, length, seed)
    from sharding.jax_settings import start_devices

    start_devices()
    results = {str(folder): _measured(folder, *texts, as_json) for folder, texts in given.items()}
    if as_json:
        rows = {name: [dataclasses.asdict(error) for error in errors] for name, errors in results.items()}
        click.echo(json.dumps(rows, indent=2))


def _measured(
    folder: Path, config: ModelConfig, tokens: np.ndarray, mask: np.ndarray, quiet: bool
) -> list[QuantizationError]:
    from glm52_jax.checkpoint.load.loader import load_params
    from glm52_jax.verification.quantization_error import measure

    notes = screen(stderr=True)
    params = load_params(folder, config, dtype="float32", fp8="dequantize")
    errors: list[QuantizationError] = []
    with spinner(notes, f"{folder}: plain") as now:
        for error in measure(params, config, tokens, mask):
            errors.append(error)
            now(f"{folder}: {error.form}")
    if not quiet:
        long = (np.where(mask, np.cumsum(mask, axis=1), 0) > config.index_topk).sum()
        title = f"{folder}: {int(mask.sum())} tokens, {int(long)} with more than {config.index_topk} to choose from"
        screen(width=120).print(_table(title, errors))
    return errors


def _table(title: str, errors: list[QuantizationError]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("form")
    for column in ("one layer", "sets", "kept", "whole model", "KL, nats", "top", "sets", "kept"):
        table.add_column(column, justify="right")
    for e in errors:
        row = [f"{e.layer:.2%}", *_shares(e.layer_sets, e.layer_kept), f"{e.logits:.2%}", f"{e.divergence:.1e}"]
        table.add_row(e.form, *row, *_shares(e.top, e.sets, e.kept))
    return table


def _shares(*shares: float | None) -> list[str]:
    return ["-" if share is None else f"{share:.1%}" for share in shares]


def _from_text(folder: Path, config: ModelConfig, path: Path) -> tuple[np.ndarray, np.ndarray]:
    from glm52_jax.text import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    tokens = Tokenizer.load(folder).encode(text)[: config.max_position_embeddings]
    if not tokens:
        raise InputError(f"{path}: holds no text")
    return token_batch([tokens], None, config.vocab_size, f"{path} with the tokenizer of {folder}")


def _from_file(folder: Path, config: ModelConfig, name: str) -> tuple[np.ndarray, np.ndarray]:
    path = folder / name if (folder / name).is_file() else Path(name)
    try:
        held = np.load(path, allow_pickle=False)
        archive = getattr(held, "files", None)
        tokens = held if archive is None else held["input_ids"]
        mask = held["attention_mask"] if archive is not None and "attention_mask" in archive else None
    except Exception as error:  # NumPy and its archives raise nothing more exact for a file that is none of theirs
        raise InputError(f"{path}: holds no token ids ({error}), expected a .npy array or input_ids in .npz") from None
    try:
        tokens, mask = token_batch(tokens, mask, config.vocab_size)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if tokens.shape[1] > config.max_position_embeddings:
        raise InputError(
            f"{path}: tokens has length {tokens.shape[1]}, more than max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    if not mask.any():
        raise InputError(f"{path}: the mask leaves no token, expected at least one")
    return tokens, mask


def _random(config: ModelConfig, length: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    length = min(length or config.index_topk + 128, config.max_position_embeddings)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, length), dtype=np.int32)
    return tokens, np.ones(tokens.shape, bool)
