"""Loading a published or a converted folder into the parameter tree: checked whole first, then leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.checkpoint.published import Contents, PublishedCheckpoint, Stored
from glm52_jax.checkpoint.safetensors_file import DTYPES
from glm52_jax.checkpoint.sources import open_checkpoint
from glm52_jax.config import ModelConfig
from glm52_jax.errors import InputError
from glm52_jax.params import build
from glm52_jax.quant import FLOAT8, BlockQuantized, dequantize_blocks
from glm52_jax.spec import Param

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


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
) -> dict[str, Any]:
    """The parameters of a checkpoint folder, on the default device.

    Args:
        path: folder with `config.json` and safetensors, one file or shards with an index, or what `glm52 convert` made
            of one.
        config: read from the folder when None.
        dtype: of the plain weights and so of the computation: bfloat16, float16 or float32; the config's when None.
            The router's correction bias stays float32 in any case.
        fp8: "keep" FP8 weights as codes and scales, a quarter of float32's bytes, or "dequantize" them here. Results
            are equal.

    Raises:
        InputError: a file or tensor is missing, extra, cut short, or of another shape or type, all before device work;
            or a scale is no number, when it is read.
    """
    return load_with_report(path, config, dtype=dtype, fp8=fp8)[0]


def load_with_report(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any = None,
    fp8: Literal["keep", "dequantize"] = "keep",
    progress: Progress | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """`load_params`, with an account of what was read and what was left."""
    if fp8 not in ("keep", "dequantize"):
        raise InputError(f"fp8 is {fp8!r}, expected keep or dequantize")
    checkpoint = open_checkpoint(path)
    contents = checkpoint.check(config or ModelConfig.from_folder(path))
    kind = _compute_dtype(contents.config.dtype if dtype is None else dtype)
    sizes = {name: checkpoint.entry(name).stop - checkpoint.entry(name).start for name in _used(contents)}
    reader = _Reader(checkpoint, contents, kind, fp8 == "keep", progress, sum(sizes.values()))
    params = build(contents.config, reader.param)
    notes = (*contents.notes, *_rounded(checkpoint, contents, kind), *reader.notes)
    return params, LoadReport(len(sizes), reader.total, contents.ignored, notes)


def _used(contents: Contents) -> set[str]:
    """Names in the files of every tensor and scale that the model is made of."""
    stored = contents.tensors.values()
    return {s.name for s in stored} | {s.scale for s in stored if s.scale}


def _compute_dtype(dtype: Any) -> np.dtype:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = jnp.dtype(jnp.bool_)
    if kind not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise InputError(f"dtype is {dtype!r}, expected bfloat16, float16 or float32")
    return kind


def _rounded(checkpoint: PublishedCheckpoint, contents: Contents, dtype: np.dtype) -> list[str]:
    """Says when tensors are stored in more bits than they are loaded in."""
    stored = (s for s in contents.tensors.values() if not s.tensor.float32)
    names = [s.name for s in stored if DTYPES[checkpoint.entry(s.name).dtype].itemsize > dtype.itemsize]
    found = {checkpoint.entry(name).dtype for name in names}
    many = f"{len(names)} tensors are" if len(names) > 1 else "1 tensor is"
    return [f"{many} stored as {' or '.join(found)} and rounded to {dtype}, {names[0]} among them"] if names else []


class _Reader:
    """Makes one stacked parameter after another; at most one of them is held on the host beside the finished ones."""

    def __init__(
        self,
        checkpoint: PublishedCheckpoint,
        contents: Contents,
        dtype: np.dtype,
        keep_fp8: bool,
        progress: Progress | None,
        total: int,
    ):
        self.checkpoint, self.contents, self.dtype, self.keep_fp8 = checkpoint, contents, dtype, keep_fp8
        self.progress, self.total, self.done = progress, total, 0
        self.notes: list[str] = []
        self._counted: set[tuple[str, Any]] = set()

    def param(self, param: Param) -> Any:
        """One leaf of the parameter tree, on the device; None for an optional one that the folder has not."""
        config = self.contents.config
        layers = [param.published(config, layer) for layer in param.layers(config)]
        if any(t.name not in self.contents.tensors for t in layers[0]):
            return None
        stored = [[self.contents.tensors[t.name] for t in tensors] for tensors in layers]
        scaled = [s.scale is not None for tensors in stored for s in tensors]
        if self.keep_fp8 and any(scaled) and not all(scaled) and not param.dequantize:
            self.notes.append(
                f"{param.path} is not kept in float8, since {scaled.count(False)} of its tensors are plain"
            )
        if self.keep_fp8 and all(scaled) and not param.dequantize:
            leaf: Any = self._quantized(param, stored)
        else:
            leaf = jnp.asarray(self._plain(param, stored))
        return jax.block_until_ready(leaf)

    def _plain(self, param: Param, stored: list[list[Stored]]) -> np.ndarray:
        dtype = np.dtype(np.float32) if param.float32 else self.dtype
        out = np.empty((len(stored), *param.shape), dtype)
        flat = out.reshape(len(stored), len(stored[0]), *param.piece_shape)
        for layer, tensors in enumerate(stored):
            for number, tensor in enumerate(tensors):
                flat[layer, number] = self._piece(param, self._values(tensor))
        return out.reshape(param.stacked_shape(self.contents.config))

    def _quantized(self, param: Param, stored: list[list[Stored]]) -> BlockQuantized:
        quantization = self.contents.config.quantization
        assert quantization is not None
        grid = stored[0][0].tensor.scale_shape(quantization.block)
        codes = np.empty((len(stored), len(stored[0]), *param.tensor_shape), FLOAT8)
        scales = np.empty((len(stored), len(stored[0]), *grid), np.float32)
        for layer, tensors in enumerate(stored):
            for number, tensor in enumerate(tensors):
                codes[layer, number] = self._read(tensor)
                scales[layer, number] = self._read_scale(tensor)
        # The dimensions before the matrix: layers, experts, gate and up.
        view = param.view or param.tensor_shape
        lead = param.stacked_shape(self.contents.config)[: -len(view)]
        return BlockQuantized(
            jnp.asarray(codes.reshape(*lead, *param.tensor_shape)),
            jnp.asarray(scales.reshape(*lead, *grid)),
            view=tuple(view),
            block=quantization.block,
        )

    @staticmethod
    def _piece(param: Param, values: np.ndarray) -> np.ndarray:
        values = values.reshape(param.view or param.tensor_shape)
        return values[:, slice(*param.rows)] if param.rows else values

    def _values(self, stored: Stored) -> np.ndarray:
        values = self._read(stored)
        if stored.scale is None:
            return values
        assert self.contents.config.quantization is not None
        return dequantize_blocks(values, self._read_scale(stored), self.contents.config.quantization.block)

    def _read(self, stored: Stored) -> np.ndarray:
        values = self.checkpoint.read(stored.name)
        if stored.fused is not None:
            expert, half = stored.fused
            values = values[expert]
            if half is not None:
                rows = values.shape[0] // 2
                values = values[half * rows : (half + 1) * rows]
        self._count((stored.name, stored.fused), values.nbytes)
        return values

    def _read_scale(self, stored: Stored) -> np.ndarray:
        assert stored.scale is not None
        scale = self.checkpoint.read(stored.scale)
        wrong = ~(scale >= 0) | np.isinf(scale)  # in this form NaN is wrong too
        if wrong.any():
            raise InputError(
                f"{self.checkpoint.folder / self.checkpoint.where[stored.scale]}: {stored.scale} holds "
                f"{scale[wrong][0]}, expected finite scales of at least 0"
            )
        self._count((stored.scale, None), scale.nbytes)
        return scale

    def _count(self, piece: tuple[str, Any], size: int) -> None:
        """Reports progress; a tensor that two parameters are made of counts once."""
        if piece not in self._counted:
            self._counted.add(piece)
            self.done += size
            if self.progress:
                self.progress(self.done, self.total)
