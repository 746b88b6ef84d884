"""Loading a published or a converted folder into the parameter tree: checked whole first, then leaf by leaf.

Every leaf is filled where it stays, so that a load never holds more than the parameters and `MARGIN_BYTES`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES
from glm52_jax.checkpoint.load.leaf_arrays import make_array
from glm52_jax.checkpoint.load.leaf_slices import LeafLayout
from glm52_jax.checkpoint.load.leaf_values import ValueReader, scales, weight
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.checkpoint.sources.published import CheckpointContents, PublishedCheckpoint, StoredTensor
from glm52_jax.checkpoint.value_checks import sentences
from glm52_jax.config import ModelConfig
from glm52_jax.params.axis_rules import check_rules
from glm52_jax.params.init import build_tree
from glm52_jax.params.quantization import BlockQuantized
from glm52_jax.params.sharding import param_shardings
from glm52_jax.params.sharding_checks import check_divides, quantized_shardings
from glm52_jax.params.spec import Param
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings
from sharding.layout import Layout

MARGIN_BYTES = 256 * 2**20
"""What a load holds at most beside the parameters, in the memory of the host and of the devices.

The host holds the tables of names (some 100 MiB for the 118,629 tensors of GLM-5.2 in FP8), the slices that are being
changed and, for accelerators, two stages of 32 MiB; the devices hold these two stages in their turn."""

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all, by one thread after another."""
Shardings = Callable[[Param], Sharding]
"""The sharding of each parameter, over the dimensions of `param.stacked_shape(config)`: the layers first where it is
stacked, then those that `param.axes` names."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load did with every tensor of the folder.

    Attributes:
        tensors: number of tensors used.
        bytes: their bytes in the files, scales included.
        ignored: names of those not used, with the reason.
        notes: sentences a user should read.
    """

    tensors: int
    bytes: int
    ignored: dict[str, str]
    notes: tuple[str, ...]


def load_params(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any = None,
    fp8: Literal["keep", "dequantize"] = "keep",
    layout: Layout | None = None,
    shardings: Shardings | None = None,
) -> dict[str, Any]:
    """The parameters of a checkpoint folder, each filled where it stays.

    At most `MARGIN_BYTES` are held beside the parameters, or beside this process's shards of them. Of the files, this
    process reads the rows and experts that its devices hold, each once however many devices share it (a matrix that is
    sharded along its columns by whole rows).

    Args:
        path: folder with `config.json` and safetensors, one file or shards with an index, or what `glm52 convert` made
            of one.
        config: read from the folder when None.
        dtype: of the plain weights and so of the computation: bfloat16, float16 or float32; the config's when None.
            The router's correction bias stays float32 in any case.
        fp8: "keep" weights in codes (FP8 or int8) as codes and scales, a quarter of float32's bytes, or "dequantize"
            them here. Results are equal.
        layout: how the parameters are divided over all devices, those of other hosts too; one device when None.
        shardings: instead of a layout, for placements of your own: called with each `Param` of the table, gives its
            `jax.sharding.Sharding` over the dimensions of `param.stacked_shape(config)`. Codes, and scales with them,
            are sharded likewise, where dimensions that only the plain form splits count as one. Everything is on the
            default device when both are None.

    Raises:
        InputError: a file or tensor is missing, extra, cut short, or of another shape or type, a layout has another
            number of devices than there are or rules that no step computes right, or a sharding does not fit its
            parameter, all before device work; or, when it is read, a scale is no finite number of at least 0, or a
            value is beyond what `dtype` holds.
    """
    return load_with_report(path, config, dtype=dtype, fp8=fp8, layout=layout, shardings=shardings)[0]


@with_project_settings
def load_with_report(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any = None,
    fp8: Literal["keep", "dequantize"] = "keep",
    layout: Layout | None = None,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """`load_params`, with an account of what was read and what was left."""
    if fp8 not in ("keep", "dequantize"):
        raise InputError(f"fp8 is {fp8!r}, expected keep or dequantize")
    if layout is not None:
        check_rules(layout)
    checkpoint = open_checkpoint(path)
    contents = checkpoint.check(config or ModelConfig.from_folder(path))
    if layout is not None and layout.devices > 1:
        if shardings is not None:
            raise InputError("layout and shardings are both given, expected one of them")
        shardings = param_shardings(contents.config, layout)
    kind = _compute_dtype(contents.config.dtype if dtype is None else dtype)
    plans: list[_LeafPlan] = []
    build_tree(
        contents.config, lambda param: plans.append(_plan(checkpoint, contents, param, kind, fp8 == "keep", shardings))
    )
    meter = _Meter({name: _size(checkpoint, name) for name in _used(contents)}, progress)
    quantization = contents.config.quantization
    with ValueReader(checkpoint, quantization.block if quantization else None, meter.count) as reader:
        leaves = {plan.param.path: _leaf(plan, reader, meter) for plan in plans if plan.stored}
    rounded = _rounded(checkpoint, contents, kind)
    notes = (*contents.notes, *rounded, *(plan.note for plan in plans if plan.note), *sentences(reader.counts))
    report = LoadReport(meter.tensors, meter.total, contents.ignored, notes)
    return build_tree(contents.config, lambda param: leaves.get(param.path)), report


def _used(contents: CheckpointContents) -> set[str]:
    """Names in the files of every tensor and scale that the model is made of."""
    stored = contents.tensors.values()
    return {s.name for s in stored} | {s.scale for s in stored if s.scale}


def _size(checkpoint: PublishedCheckpoint, name: str) -> int:
    return checkpoint.entry(name).stop - checkpoint.entry(name).start


def _compute_dtype(dtype: Any) -> np.dtype:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = jnp.dtype(jnp.bool_)
    if kind not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise InputError(f"dtype is {dtype!r}, expected bfloat16, float16 or float32")
    return kind


def _rounded(checkpoint: PublishedCheckpoint, contents: CheckpointContents, dtype: np.dtype) -> list[str]:
    """Says when tensors are stored in more bits than they are loaded in."""
    stored = (s for s in contents.tensors.values() if not s.tensor.float32)
    names = [s.name for s in stored if DTYPES[checkpoint.entry(s.name).dtype].itemsize > dtype.itemsize]
    found = {checkpoint.entry(name).dtype for name in names}
    many = f"{len(names)} tensors are" if len(names) > 1 else "1 tensor is"
    return [f"{many} stored as {' or '.join(found)} and rounded to {dtype}, {names[0]} among them"] if names else []


@dataclasses.dataclass(frozen=True)
class _LeafPlan:
    """How one leaf is made.

    Attributes:
        stored: its tensors, layer by layer; none for an optional parameter that the folder has not.
        shape: of the stacked parameter in plain form.
        dtype: of the plain form.
        codes: block of the scales where it is kept in codes; None in plain form.
        shardings: of the array, or of codes and scales.
        note: a sentence a user should read, or "".
    """

    param: Param
    stored: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    codes: tuple[int, int] | None = None
    shardings: tuple[Sharding | None, Sharding | None] = (None, None)
    note: str = ""

    def form(
        self, tensor: tuple[int, ...], logical_shape: tuple[int, ...], rows: tuple[int, int] | None = None
    ) -> LeafLayout:
        """Over the leading dimensions of the parameter: layers, experts, gate and up."""
        return LeafLayout(self.shape[: len(self.shape) - len(self.param.piece_shape)], tensor, logical_shape, rows)


def _plan(
    checkpoint: PublishedCheckpoint,
    contents: CheckpointContents,
    param: Param,
    kind: np.dtype,
    keep: bool,
    shardings: Shardings | None,
) -> _LeafPlan:
    config, shape = contents.config, param.stacked_shape(contents.config)
    dtype = np.dtype(np.float32) if param.float32 else kind
    tensors = [tensor for layer in param.layers(config) for tensor in param.published(config, layer)]
    if any(tensor.name not in contents.tensors for tensor in tensors):
        return _LeafPlan(param, (), shape, dtype)
    stored = tuple(contents.tensors[tensor.name] for tensor in tensors)
    plain = sum(s.scale is None for s in stored)
    keep = keep and not param.dequantize and plain < len(stored)
    note = ""
    if keep and plain:
        coded = next(s for s in stored if s.scale is not None)
        codes = DTYPES[checkpoint.entry(coded.name).dtype].name.partition("_")[0]
        note, keep = f"{param.path} is not kept in {codes}, since {plain} of its tensors are plain", False
    sharding = shardings(param) if shardings else None
    if sharding is not None:
        check_divides(param, shape, sharding)
    if not keep:
        return _LeafPlan(param, stored, shape, dtype, None, (sharding, None), note)
    assert config.quantization is not None
    block = config.quantization.block
    return _LeafPlan(param, stored, shape, dtype, block, quantized_shardings(param, shape, sharding, block))


def _leaf(plan: _LeafPlan, reader: ValueReader, meter: _Meter) -> Any:
    """One leaf of the parameter tree, in place."""
    param, (first, second) = plan.param, plan.shardings
    logical_shape = param.logical_shape or param.tensor_shape
    if plan.codes is None:
        form = plan.form(param.tensor_shape, logical_shape, param.rows)
        parts = [weight(s, dequantize=s.scale is not None) for s in plan.stored]
        leaf: Any = make_array(form.shape, plan.dtype, first, lambda targets: reader.fill(form, parts, targets))
    else:
        grid = plan.stored[0].tensor.scale_shape(plan.codes)
        code_form, scale_form = (plan.form(shape, shape) for shape in (param.tensor_shape, grid))
        codes, scale = [weight(s, dequantize=False) for s in plan.stored], [scales(s) for s in plan.stored]
        kind = DTYPES[reader.source.entry(codes[0].name).dtype]
        leaf = BlockQuantized(
            make_array(code_form.shape, kind, first, lambda targets: reader.fill(code_form, codes, targets)),
            make_array(scale_form.shape, np.dtype(np.float32), second, lambda t: reader.fill(scale_form, scale, t)),
            logical_shape=tuple(logical_shape),
            block=plan.codes,
            row_dims=param.row_dims,
        )
    meter.finish(name for s in plan.stored for name in (s.name, s.scale) if name)
    return jax.block_until_ready(leaf)


class _Meter:
    """Reports progress; bytes that are read for two parameters count once, and those of other processes as read."""

    def __init__(self, sizes: dict[str, int], progress: Progress | None):
        self.total, self.tensors = sum(sizes.values()), len(sizes)
        self._left, self._done, self._progress, self._lock = sizes, 0, progress, threading.Lock()

    def count(self, name: str, size: int) -> None:
        with self._lock:
            self._advance(name, min(size, self._left[name]))

    def finish(self, names: Iterable[str]) -> None:
        """Of these tensors nothing more will be read."""
        with self._lock:
            for name in names:
                self._advance(name, self._left[name])

    def _advance(self, name: str, size: int) -> None:
        self._left[name] -= size
        self._done += size
        if size and self._progress:
            self._progress(self._done, self.total)
