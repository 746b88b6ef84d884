"""What a conversion or an export is asked to do, and the config that its result has. Knows no files."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from glm52_jax.checkpoint.convert.transform import Piece, TensorReader, piece
from glm52_jax.checkpoint.formats.orbax_layout import CHUNK_BYTES
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES
from glm52_jax.checkpoint.sources.published import CODES, CheckpointContents
from glm52_jax.config import ModelConfig, QuantizationConfig
from glm52_jax.config.config_json import DTYPE_FIELDS
from sharding.errors import InputError

KEEP = "keep"
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
QUANTIZE = {"fp8": "fp8", "int8": "blockwise_int8"}
"""Names of the options, and the `quant_method` that `config.json` has for them."""
PUBLISHED_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """Attributes:
    dtype: "keep", or the type of every plain tensor but the float32 ones; weights in codes are then dequantised.
    quantize: "fp8" or "int8" to store in blocks of codes what the published FP8 files store so, or None.
    layers: the layers to take, the MTP layer under its number; None for all.
    without_mtp: go on where the MTP layer is declared but absent, or leave it out.
    chunk_bytes: largest chunk of the store.
    """

    dtype: str = KEEP
    quantize: str | None = None
    layers: tuple[int, ...] | None = None
    without_mtp: bool = False
    chunk_bytes: int = CHUNK_BYTES

    def as_json(self) -> dict[str, Any]:
        raw = dataclasses.asdict(self)
        return raw | {"layers": None if self.layers is None else list(self.layers)}

    def options(self) -> list[str]:
        """As they are written on a command line, the default ones left out."""
        parts = ["--dtype", self.dtype] if self.dtype != KEEP else []
        parts += ["--quantize", self.quantize] if self.quantize else []
        parts += ["--layers", ",".join(map(str, self.layers))] if self.layers is not None else []
        parts += ["--without-mtp"] if self.without_mtp else []
        parts += ["--chunk-size", str(self.chunk_bytes)] if self.chunk_bytes != CHUNK_BYTES else []
        return parts


def command_line(command: str, source: str, destination: Any, options: list[str]) -> str:
    """A command of `glm52` as it can be pasted into a shell, whatever the names are."""
    places = [source, str(destination)]
    if any(place.startswith("-") for place in places):
        return shlex.join(["glm52", command, *options, "--", *places])
    return shlex.join(["glm52", command, *places, *options])


def checked(source: Any, config: ModelConfig, settings: ConversionOptions) -> CheckpointContents:
    """What the source holds, compared with its config.

    Raises:
        InputError: a tensor is missing, extra or of another form; the MTP layer is declared but absent; the source is
            in codes that cannot be quantised so; a layer is asked for that the model has not.
    """
    if settings.dtype not in (KEEP, *DTYPE_NAMES):
        raise InputError(f"dtype is {settings.dtype!r}, expected {KEEP} or {' or '.join(DTYPE_NAMES)}")
    if settings.quantize not in (None, *QUANTIZE):
        raise InputError(f"quantize is {settings.quantize!r}, expected {' or '.join(QUANTIZE)}")
    contents: CheckpointContents = source.check(config.without_mtp() if settings.without_mtp else config)
    if config.has_mtp and not contents.config.has_mtp and not settings.without_mtp:
        raise InputError(
            f"{source.folder}: config.json declares an MTP layer (num_nextn_predict_layers 1), but there is no tensor "
            f"of it (model.layers.{config.num_hidden_layers}.*); --without-mtp goes on without it"
        )
    found = config.quantization
    if found and settings.quantize and (QUANTIZE[settings.quantize] == found.method or found.method != "fp8"):
        expected = "plain weights" if settings.quantize == "fp8" else "plain or FP8 weights"
        raise InputError(
            f"{source.folder}: holds {found.codes} codes already (quant_method {found.method}), expected {expected} to "
            f"quantise to {settings.quantize}"
        )
    last = config.num_hidden_layers + contents.config.has_mtp - 1
    for layer in settings.layers or ():
        if not 0 <= layer <= last:
            raise InputError(f"layers names {layer}, but the model has layers 0 to {last}")
    return contents


def pieces(source: TensorReader, contents: CheckpointContents, settings: ConversionOptions) -> list[Piece]:
    """Everything to write, in the order of the source's files, so that each is read from front to back."""
    made = _quantization(settings)
    quantized = _quantized_names(contents.config, made) if made else frozenset()
    found = []
    for name, stored in contents.tensors.items():
        if settings.layers is not None and _layer(name) not in (None, *settings.layers):
            continue
        dtype = None if settings.dtype == KEEP or stored.tensor.float32 else DTYPE_NAMES[settings.dtype]
        if made and name in quantized:
            dtype = made.codes
        found.append(piece(source, contents, stored.tensor, dtype, made.block if made else None))
    return sorted(found, key=lambda p: (p.file, source.entry(p.stored.name).start + p.offset, p.name))


def target_config(contents: CheckpointContents, settings: ConversionOptions, written: list[Piece]) -> ModelConfig:
    """The config of what is written."""
    config = contents.config
    made = _quantization(settings)
    if made:
        plain = [p.name.removesuffix(".weight") for p in written if p.outputs[0].dtype not in CODES]
        config = dataclasses.replace(config, quantization=dataclasses.replace(made, high_precision=tuple(plain)))
    if settings.dtype != KEEP:
        quantization = config.quantization if settings.quantize else None
        config = dataclasses.replace(config, dtype=settings.dtype, quantization=quantization)
    return config


def target_json(raw: Mapping[str, Any], found: ModelConfig, target: ModelConfig) -> dict[str, Any] | None:
    """The content of the target's `config.json`: the source's, with what changes; None where nothing does.

    Args:
        raw: the content of the source's `config.json`.
        found, target: the config of the source and of the target.
    """
    if found == target:
        return None
    new, full = dict(raw), target.to_dict()
    if found.dtype != target.dtype:
        new |= {field: target.dtype for field in DTYPE_FIELDS if field in raw} or {"dtype": target.dtype}
    if found.quantization != target.quantization:
        new.pop("quantization_config", None)
        new |= {"quantization_config": full["quantization_config"]} if target.quantization else {}
    if found.has_mtp and not target.has_mtp:
        new["num_nextn_predict_layers"] = 0
    try:
        # Ids that end a text may come from generation_config.json, which is copied beside it.
        same = dataclasses.replace(ModelConfig.from_dict(new), **_from_generation(target)) == target
    except InputError:
        same = False
    return new if same else full


def changes(written: list[Piece]) -> list[str]:
    """A sentence for each way in which values are no longer those of the source."""
    words = {
        "quantize": "quantised, which rounds them",
        "requantize": "quantised again, which rounds them",
        "dequantize": "dequantised, codes times scales",
    }
    found: dict[tuple[str, str | None, str], int] = {}
    for p in written:
        weight = p.outputs[0]
        key = (p.kind, weight.source_dtype, weight.dtype)
        found[key] = found.get(key, 0) + 1
    sentences = []
    for (kind, before, after), count in sorted(found.items(), key=str):
        if kind == "copy":
            continue
        word = words.get(kind) or ("widened, which changes no value" if _widens(before, after) else "rounded")
        sentences.append(f"{count} {'tensor' if count == 1 else 'tensors'} of {before} became {after}: {word}")
    return sentences


def _widens(before: str | None, after: str) -> bool:
    return before is not None and DTYPES[before].itemsize < DTYPES[after].itemsize


def _quantization(settings: ConversionOptions) -> QuantizationConfig | None:
    return QuantizationConfig(PUBLISHED_BLOCK, method=QUANTIZE[settings.quantize]) if settings.quantize else None


def _quantized_names(config: ModelConfig, made: QuantizationConfig) -> frozenset[str]:
    """What the parameter table stores in codes: of a source in codes, what is so there."""
    from glm52_jax.params.spec import published_tensors

    policy = dataclasses.replace(config, quantization=config.quantization or made)
    return frozenset(tensor.name for _, tensor in published_tensors(policy) if tensor.quantized)


def _from_generation(config: ModelConfig) -> dict[str, Any]:
    fields = ("eos_token_ids", "temperature", "top_p", "top_k", "pad_token_id")
    return {field: getattr(config, field) for field in fields}


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None
