"""`glm52 demo`: makes a small checkpoint of GLM-5.2's shape and takes the whole path with it."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export import export
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig
from glm52_jax.inputs.values import SEED
from glm52_jax.inspect.account import model_breakdown
from glm52_jax.io.files import check_folder
from glm52_jax.io.terminal import screen
from glm52_jax.model.transformer import forward
from glm52_jax.params.init import init_params
from glm52_jax.text import ChatFormat, Tokenizer, write_byte_tokenizer
from glm52_jax.verification.verify import verify
from infer.commands.session import stats_line
from infer.generate import Generation, generate
from sharding.errors import InputError
from sharding.jax_settings import start_devices

PROMPT = "A mixture of experts sends each token to a few of its experts, and sparse attention reads a few positions."
NEW_TOKENS = 32


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the random weights.")
def demo(folder: Path | None, seed: int) -> None:
    """Make a small GLM-5.2-shaped checkpoint and take the whole path with it, in about a minute.

    The checkpoint (random weights, BF16 and FP8, a byte-level tokenizer with GLM's special tokens) is kept in FOLDER
    when one is given, which must be new or empty.
    """
    console = screen(soft_wrap=True)
    if folder is not None and folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise InputError(f"{folder}: already there and not empty; the demo writes to a new folder")
    if folder is not None:
        check_folder(folder)
    start_devices()
    place = folder or Path(tempfile.mkdtemp(prefix="glm52-demo-"))
    try:
        _run(console, place, seed)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if folder is not None:
        bf16, fp8, orbax = (shlex.quote(str(folder / name)) for name in ("bf16", "fp8", "fp8-orbax"))
        console.print(f"\nTry: glm52 inspect {bf16} --ops")
        console.print(f'     glm52 generate {bf16} "Hello" --draft-tokens 3')
        console.print(f'     glm52 generate {orbax} "Hello" --kv fp8')
        console.print(f"     glm52 chat {fp8} --max-new-tokens 40")
        console.print(f"     glm52 precision {bf16}")


def _run(console: Console, place: Path, seed: int) -> None:
    begin = time.perf_counter()
    config = BUILT_IN["glm-5.2-tiny"]
    console.print(_step("1. Make", "a checkpoint in the published layout, in BF16 and in FP8 blocks"))
    folders = _make(place, config, seed)
    for name, path in folders.items():
        files = sorted(path.glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files)
        console.print(f"   {name}: {len(files)} file{'s' * (len(files) > 1)}, {size / 1e6:.2f} MB of safetensors")

    console.print(_step("2. Inspect", "it"))
    _show_account(console, config)

    console.print(_step("3. Convert", "both to Orbax, verify every value, and export them again"))
    converted = {name: _convert_and_back(console, name, path) for name, path in folders.items()}

    console.print(_step("4. Load", "the converted ones, every tensor checked against the parameter table"))
    loaded: dict[str, Any] = {}
    for name, path in converted.items():
        loaded[name], report = load_with_report(path)
        console.print(
            f"   {name}: {report.tensors:,} tensors, {report.bytes / 1e6:.2f} MB, nothing missing or left over"
        )

    tokenizer = Tokenizer.load(converted["BF16"])
    prompt = ChatFormat.load(converted["BF16"], tokenizer).encode([{"role": "user", "content": PROMPT}])
    console.print(_step("5. Run", f"a chat prompt of {len(prompt)} tokens, of which a query sees {config.index_topk}"))
    _show_equality(console, folders, loaded, prompt)

    console.print(_step("6. Generate", f"{NEW_TOKENS} tokens (the weights are random, and so is the text)"))
    _show_generation(console, config, loaded["BF16"], prompt, tokenizer)
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")


def _step(number_and_verb: str, what: str) -> Text:
    return Text.assemble((number_and_verb, "bold"), f" {what}")


def _make(place: Path, config: ModelConfig, seed: int) -> dict[str, Path]:
    """BF16 in shards and FP8 in one file, of the same weights, each with its tokenizer."""
    # Larger than `initializer_range`, so that choices of experts and positions are not close to ties.
    config_wide = dataclasses.replace(config, initializer_range=0.2)
    params = init_params(config_wide, jax.random.key(seed), dtype=jnp.bfloat16)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    folders = {"BF16": place / "bf16", "FP8": place / "fp8"}
    write_checkpoint(folders["BF16"], config, params, shard_bytes=total // 4 + 1)
    write_checkpoint(folders["FP8"], dataclasses.replace(config, quantization=QuantizationConfig((128, 128))), params)
    for folder in folders.values():
        write_byte_tokenizer(folder, vocab_size=config.vocab_size)
    return folders


def _show_account(console: Console, config: ModelConfig) -> None:
    report = model_breakdown(config, "demo").as_json()
    layers, parameters = report["layers"], report["parameters"]
    console.print(
        f"   {layers['total']} layers ({layers['dense']} dense, {layers['sparse']} of experts; "
        f"{layers['full']} full, {layers['shared']} shared) and an MTP layer"
    )
    console.print(f"   {parameters['total']:,} parameters, {parameters['active']:,} active a token")


def _convert_and_back(console: Console, name: str, folder: Path) -> Path:
    """The converted folder; what is exported from it is the published one again, to the byte."""
    target, back = folder.with_name(f"{folder.name}-orbax"), folder.with_name(f"{folder.name}-exported")
    planned = conversion.plan(folder, target, ConversionOptions())
    conversion.convert(planned)
    report = verify(open_checkpoint(target), open_checkpoint(folder))
    export.export(export.plan(target, back, ConversionOptions(), shard_bytes=planned.bytes // 4 + 1))
    again = verify(open_checkpoint(back), open_checkpoint(folder))
    differences = [*report.differences, *again.differences]
    verdict = differences[0] if differences else "every value equal, there and back"
    console.print(f"   {name}: {report.tensors:,} tensors in {len(planned.leaves)} Orbax arrays, {verdict}")
    return target


def _show_equality(console: Console, folders: dict[str, Path], loaded: dict[str, Any], prompt: list[int]) -> None:
    """FP8 weights kept as codes give what the same weights give when they are dequantised at load."""
    config = ModelConfig.from_folder(folders["FP8"])
    plain, _ = load_with_report(folders["FP8"], fp8="dequantize")
    tokens = np.array([prompt])
    kept, dequantized = (np.asarray(forward(p, config, tokens)) for p in (loaded["FP8"], plain))
    bf16 = np.asarray(forward(loaded["BF16"], config, tokens))
    console.print(
        f"   FP8 kept as codes, beside dequantised at load: largest difference {abs(kept - dequantized).max()}"
    )
    cosine = (kept * bf16).sum() / np.linalg.norm(kept) / np.linalg.norm(bf16)
    console.print(
        f"   FP8 beside BF16: cosine of the logits {cosine:.2f} (with random weights many choices are close calls)"
    )


def _show_generation(
    console: Console, config: ModelConfig, params: Any, prompt: list[int], tokenizer: Tokenizer
) -> None:
    texts = {}
    for drafts in (0, 3):
        generation = Generation(params, config, [prompt], NEW_TOKENS, draft_tokens=drafts, stop_ids=())
        texts[drafts] = [token for _, tokens in generation for token in tokens]
        console.print(f"   {drafts} drafts a step: {stats_line(generation.stats)}")
    same = "the same tokens" if texts[0] == texts[3] else "DIFFERENT tokens"
    console.print(f"   with and without drafts: {same} (an untrained MTP layer only guesses)")
    sampled = generate(params, config, [prompt], NEW_TOKENS, temperature=1.0, top_p=0.95, seed=1, stop_ids=())
    console.print(f"   greedy:  {tokenizer.decode(texts[0])!r}")
    console.print(f"   sampled: {tokenizer.decode(sampled[0])!r}")
