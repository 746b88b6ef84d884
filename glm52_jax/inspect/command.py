"""`glm52 inspect`: reads a name, a config or a folder's headers, and prints the account; it computes nothing itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from glm52_jax.checkpoint.sources.published import INDEX_FILE, CheckpointContents, PublishedCheckpoint
from glm52_jax.config import ModelConfig, load_config
from glm52_jax.inputs.lengths import LENGTH
from glm52_jax.inspect.account import CONTEXTS, model_breakdown
from glm52_jax.inspect.operators import operators
from glm52_jax.io.files import is_there
from glm52_jax.params.spec import config_notes
from sharding.errors import InputError

DEFAULT_CONTEXT, DEFAULT_CHUNK = 128 * 1024, 2048


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name_or_path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys.")
@click.option(
    "--ops", is_flag=True, help="Also the operators of a full and a shared layer; --batch or --chunk imply it."
)
@click.option("--batch", type=int, help="Sequences of the operator table.  [default: 1]")
@click.option("--context", type=LENGTH, help="Tokens in the cache, such as 128k or 1m.  [default: 128k]")
@click.option("--chunk", type=LENGTH, help="Tokens of a sequence in a prefill step.  [default: 2k]")
def inspect(
    name_or_path: str, as_json: bool, ops: bool, batch: int | None, context: int | None, chunk: int | None
) -> None:
    """Layer plan, parameters, bytes and FLOPs of a model.

    NAME_OR_PATH is a built-in name such as glm-5.2 or glm-5.2-fp8, a config.json, or a checkpoint folder, whose
    tensors are then compared with the model's. No weight is read.
    """
    config = load_config(name_or_path)
    contents, files = _files(config, name_or_path)
    config = contents.config if contents else config
    length, contexts = _lengths(config, context)
    report = model_breakdown(config, name_or_path, contexts)
    table = None
    if ops or batch is not None or chunk is not None:
        known = [c for c in contexts if c <= config.max_position_embeddings]
        batch, chunk = 1 if batch is None else batch, chunk or min(DEFAULT_CHUNK, length)
        table = operators(config, batch=batch, context=length, chunk=chunk, contexts=known)
    if as_json:
        found = report.as_json() | {"notes": list(config_notes(config)), "files": files}
        click.echo(json.dumps(found | ({"operators": table} if table else {}), indent=2))
        return
    from glm52_jax.inspect.report import show  # rich is not needed for JSON

    only_config = files is None and Path(name_or_path).is_dir()
    note = "The folder holds no safetensors: this is the account of its config.json alone." if only_config else None
    show(config, report, files=files, note=note, operators=table)


def _lengths(config: ModelConfig, asked: int | None) -> tuple[int, list[int]]:
    """The context of the operator table, and all of the FLOP table: one at least is within the model's reach."""
    longest = config.max_position_embeddings
    if asked is not None and asked > longest:
        raise InputError(f"--context is {asked} tokens, more than the model's max_position_embeddings, {longest}")
    shown = {*CONTEXTS, *([asked] if asked else []), *([longest] if longest < min(CONTEXTS) else [])}
    return asked or min(DEFAULT_CONTEXT, longest), sorted(shown)


def _files(config: ModelConfig, path: str) -> tuple[CheckpointContents | None, dict[str, Any] | None]:
    """What a folder's safetensors hold, checked against the table; nothing where there are none."""
    folder = Path(path)
    if not folder.is_dir() or not (is_there(folder / INDEX_FILE) or any(folder.glob("*.safetensors"))):
        return None, None
    checkpoint = PublishedCheckpoint(folder)
    contents = checkpoint.check(config)
    entries = [checkpoint.entry(name) for name in checkpoint.where]
    return contents, {
        "tensors": len(entries),
        "bytes": sum(entry.stop - entry.start for entry in entries),
        "ignored": contents.ignored,
        "notes": list(contents.notes),
    }
