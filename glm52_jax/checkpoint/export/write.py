"""Writing a parameter tree as a folder in the published layout: the inverse of `load`, from the same table."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, tensor_bytes, write_safetensors
from glm52_jax.checkpoint.sources.published import INDEX_FILE, SINGLE_FILE, fused_name
from glm52_jax.checkpoint.value_checks import cast, refuse_scales
from glm52_jax.config import ModelConfig
from glm52_jax.io.files import is_there, reading, whole_file, writing
from glm52_jax.params.quantization import BlockQuantized, dequantize_blocks, quantize_blocks
from glm52_jax.params.spec import Param, Stack, Tensor, parameters
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings

Params = dict[str, Any]


@with_project_settings
def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    shard_bytes: int | None = None,
    fused_experts: bool = False,
) -> None:
    """Writes parameters as a folder in the published layout, which `load_params` and `transformers` read.

    Tensors are stored in `config.dtype`, the router's correction bias in float32. Where `config.quantization` is set,
    those that the parameter table marks are stored in blocks of codes: weights that are in such codes as they are,
    others quantised here (`kv_b_proj` is always one of them, since it is computed with in plain form). `config.json`
    then lists every module that is not, whatever the list of `config` says.

    Every file is written under a temporary name and renamed when it is whole, weights first, then the index, then
    `config.json`: a folder without it is not finished. One tensor at a time is in memory, beside the one layer of a
    parameter that it is taken from.

    Args:
        folder: new, or without safetensors, index, `config.json` and `generation_config.json`; a tokenizer may be
            there already.
        config: of the model, and how to store it.
        params: from `load_params`, `init_params` or training; its leaves may be numpy arrays.
        shard_bytes: largest size of a file's tensors, a larger tensor having a file of its own; one file when None.
        fused_experts: one tensor for all experts of a layer, `experts.gate_up_proj` and `experts.down_proj`, the form
            in which some releases of `transformers` write them; not in codes.

    Raises:
        InputError: a parameter is missing, extra or of another shape, or the folder holds a checkpoint, before anything
            is written; a weight to quantise is not finite, one is beyond what the stored type holds, a scale is no
            finite number of at least 0, or the folder cannot be written.
    """
    folder = Path(folder)
    if shard_bytes is not None and (isinstance(shard_bytes, bool) or shard_bytes < 1):
        raise InputError(f"shard_bytes is {shard_bytes!r}, expected at least 1")
    if fused_experts and config.quantization is not None:
        raise InputError("fused_experts is set, but quantization_config stores experts in codes, one by one")
    leaves = _checked_leaves(config, params)
    source = _Source(config, leaves)
    pieces = _pieces(config, leaves, fused_experts)
    _refuse_occupied(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_weights(folder, pieces, source, shard_bytes)
        _write_json(folder / "generation_config.json", config.generation_dict())
        _write_json(folder / "config.json", _listing_plain(config, pieces).to_dict())


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A published tensor, or all experts of a layer in one, and what it is made of.

    Attributes:
        tensor: its name and shape in the file.
        stored: type and shape by name, of the tensor and of its scale.
        made_of: the parameters and the ordinal of the layer in their stacks; several share out the rows of one tensor.
        number: of the tensor among those of the parameter's layer; None where it is the whole of it.
    """

    tensor: Tensor
    stored: dict[str, tuple[np.dtype, tuple[int, ...]]]
    made_of: tuple[tuple[Param, int], ...]
    number: int | None

    @property
    def bytes(self) -> int:
        return sum(tensor_bytes(dtype, shape) for dtype, shape in self.stored.values())


def _checked_leaves(config: ModelConfig, params: Params) -> dict[str, Any]:
    """Leaves by path, each with the shape that the table gives it."""
    if config.has_mtp and "mtp" not in params:
        raise InputError(
            "params has no mtp, expected it as num_nextn_predict_layers is 1; config.without_mtp() describes a model "
            "without the draft layer"
        )
    found = dict(_flat(params))
    leaves: dict[str, Any] = {}
    for param in parameters(config):
        leaf = found.pop(param.path, None)
        if leaf is not None:
            _check_leaf(config, param, leaf)
            leaves[param.path] = leaf
        elif not param.optional:
            raise InputError(f"params has no {param.path}, expected it with shape {param.stacked_shape(config)}")
    if found:
        raise InputError(f"params holds {next(iter(found))}, which is no parameter of a model with this config")
    return leaves


def _flat(tree: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from _flat(node, f"{prefix}{name}.")
        else:
            yield prefix + name, node


def _check_leaf(config: ModelConfig, param: Param, leaf: Any) -> None:
    expected = param.stacked_shape(config)
    if isinstance(leaf, BlockQuantized):
        _check_quantized(param, leaf)
        found = (*leaf.codes.shape[:-2], *leaf.logical_shape)
    else:
        found = tuple(leaf.shape)
    if found != expected:
        raise InputError(f"params: {param.path} has shape {found}, expected {expected}")
    if param.float32 and leaf.dtype != jnp.float32:
        raise InputError(f"params: {param.path} is {leaf.dtype}, expected float32, of which rounding leaves too little")


def _check_quantized(param: Param, leaf: BlockQuantized) -> None:
    if param.dequantize or not param.fp8:
        raise InputError(f"params: {param.path} is in blocks of codes, expected plain weights")
    (rows, columns), block = param.tensor_shape, leaf.block
    found = leaf.codes.shape[-2:], leaf.scales.shape[-2:]
    expected = (rows, columns), (-(-rows // block[0]), -(-columns // block[1]))
    if found != expected:
        raise InputError(f"params: {param.path} has codes and scales {found} a matrix, expected {expected}")


def _pieces(config: ModelConfig, leaves: dict[str, Any], fused_experts: bool) -> list[_Piece]:
    """Every tensor to write, layer by layer: the embedding, the layers, then the final norm and the head."""
    pieces: dict[str, _Piece] = {}
    for param in parameters(config):
        if param.path not in leaves:
            continue
        for ordinal, layer in enumerate(param.layers(config)):
            tensors = param.published(config, layer)
            whole = fused_experts and param.experts is not None
            for number, tensor in enumerate([_fused(param, tensors[0])] if whole else tensors):
                before = pieces[tensor.name].made_of if tensor.name in pieces else ()
                made_of = (*before, (param, ordinal))  # two parameters can share one tensor
                pieces[tensor.name] = _Piece(tensor, _stored(config, tensor), made_of, None if whole else number)
    return sorted(pieces.values(), key=lambda piece: _place(config, piece))


def _place(config: ModelConfig, piece: _Piece) -> int:
    param, ordinal = piece.made_of[0]
    if param.stack is Stack.GLOBAL:
        return -1 if param.path == "embed" else config.num_hidden_layers + 1
    return param.layers(config)[ordinal]


def _fused(param: Param, first: Tensor) -> Tensor:
    """The tensor that holds all experts of a layer; gate and up are halves of its rows, as in the parameter."""
    fused = fused_name(first.name)
    assert fused is not None
    assert param.experts is not None
    rows, columns = param.tensor_shape
    per_expert = len(param.tensors)
    return dataclasses.replace(first, name=fused[0], shape=(param.experts, per_expert * rows, columns))


def _stored(config: ModelConfig, tensor: Tensor) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    if not tensor.quantized:
        kind = np.dtype(np.float32) if tensor.float32 else np.dtype(jnp.dtype(config.dtype))
        return {tensor.name: (kind, tensor.shape)}
    assert config.quantization is not None
    scales = tensor.scale_shape(config.quantization.block)
    return {
        tensor.name: (DTYPES[config.quantization.codes], tensor.shape),
        tensor.scale_name: (np.dtype(np.float32), scales),
    }


class _Source:
    """Makes stored tensors from the leaves, fetching one layer of a leaf at a time."""

    def __init__(self, config: ModelConfig, leaves: dict[str, Any]):
        self.config, self.leaves = config, leaves
        self._last: tuple[tuple[str, int], Any] | None = None

    def arrays(self, pieces: Iterable[_Piece]) -> Iterator[tuple[str, np.ndarray]]:
        for piece in pieces:
            if piece.tensor.quantized:
                codes, scales = self._quantized(piece)
                yield piece.tensor.name, codes
                yield piece.tensor.scale_name, scales
            else:
                dtype, shape = piece.stored[piece.tensor.name]
                values, counts = cast(self._plain(piece), dtype)
                counts.refuse_beyond(f"params: {piece.tensor.name}", dtype)
                yield piece.tensor.name, values.reshape(shape)

    def _quantized(self, piece: _Piece) -> tuple[np.ndarray, np.ndarray]:
        quantization, name = self.config.quantization, piece.tensor.name
        assert quantization is not None
        param, ordinal = piece.made_of[0]
        leaf = self._layer(param, ordinal)
        wanted = DTYPES[quantization.codes]
        if isinstance(leaf, BlockQuantized) and leaf.block == quantization.block and leaf.codes.dtype == wanted:
            codes, scales = (part[piece.number] for part in _matrices(leaf))
            refuse_scales(scales, f"params: {piece.tensor.scale_name}")
            return codes, scales.astype(np.float32)
        values = self._plain(piece).astype(np.float32).reshape(piece.tensor.shape)
        if not np.isfinite(values).all():
            raise InputError(f"params: {param.path} is not finite in {name}, so it has no scale to be quantised with")
        return quantize_blocks(values, quantization.block, wanted)

    def _plain(self, piece: _Piece) -> np.ndarray:
        """The values of a tensor in the type of its parameters, some of which are views of one tensor."""
        parts = [self._part(param, ordinal, piece.number) for param, ordinal in piece.made_of]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _part(self, param: Param, ordinal: int, number: int | None) -> np.ndarray:
        leaf = self._layer(param, ordinal)
        if isinstance(leaf, BlockQuantized):
            codes, scales = _matrices(leaf)
            chosen = slice(None) if number is None else number
            return dequantize_blocks(codes[chosen], scales[chosen], leaf.block)
        return leaf if number is None else leaf.reshape(-1, *param.piece_shape)[number]

    def _layer(self, param: Param, ordinal: int) -> Any:
        """One layer of a leaf on the host; the last one is kept, since experts are taken from it one after another."""
        key = (param.path, ordinal)
        if self._last is None or self._last[0] != key:
            leaf, single = self.leaves[param.path], param.stack in (Stack.GLOBAL, Stack.MTP)
            self._last = key, jax.tree.map(lambda a: _host(a, None if single else ordinal), leaf)
        return self._last[1]


def _matrices(leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one layer as lists of matrices."""
    return tuple(a.reshape(-1, *a.shape[-2:]) for a in (leaf.codes, leaf.scales))


def _host(array: Any, ordinal: int | None) -> np.ndarray:
    """An array or one layer of it; a stack on accelerators can be larger than the host's memory."""
    if ordinal is None:
        return np.asarray(array)
    here = isinstance(array, np.ndarray) or {d.platform for d in array.devices()} == {"cpu"}
    return np.asarray(array)[ordinal] if here else np.asarray(array[ordinal])


def _write_weights(folder: Path, pieces: list[_Piece], source: _Source, shard_bytes: int | None) -> None:
    shards = _shards(pieces, shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        stored = {tensor: kind for piece in shard for tensor, kind in piece.stored.items()}
        write_safetensors(folder / name, stored, source.arrays(shard))
    if len(shards) > 1:
        weight_map = {t: name for name, shard in zip(names, shards, strict=True) for p in shard for t in p.stored}
        total = sum(piece.bytes for piece in pieces)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX_FILE, index)


def _shards(pieces: list[_Piece], shard_bytes: int | None) -> list[list[_Piece]]:
    """Pieces in files of at most `shard_bytes`, in order; a weight and its scale stay together."""
    shards: list[list[_Piece]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and shard_bytes is not None and size + piece.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.bytes
    return shards


def _listing_plain(config: ModelConfig, pieces: list[_Piece]) -> ModelConfig:
    """The config with every module that is not in codes named, for readers that know no table of parameters."""
    if config.quantization is None:
        return config
    plain = [piece.tensor.name.removesuffix(".weight") for piece in pieces if not piece.tensor.quantized]
    names = tuple(dict.fromkeys((*config.quantization.high_precision, *plain)))
    return dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, high_precision=names))


def _refuse_occupied(folder: Path) -> None:
    if not is_there(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder to write to")
    own = ("config.json", "generation_config.json", INDEX_FILE)
    with reading(folder):
        taken = [name for name in sorted(os.listdir(folder)) if name in own or name.endswith(".safetensors")]
    if taken:
        raise InputError(
            f"{folder / taken[0]}: is there already, expected a folder without a checkpoint, not even a part of one"
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
