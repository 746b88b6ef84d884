"""A folder in the published layout: which tensor is in which file, and whether they are the ones the table asks for.

Opening a folder reads headers only. `PublishedCheckpoint.check` compares them with the parameter table before anything
is loaded, so that a wrong checkpoint is refused in one sentence and before device work.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from glm52_jax.checkpoint.safetensors_file import Entry, SafetensorsFile
from glm52_jax.config import SHARED, ModelConfig, read_json
from glm52_jax.errors import InputError
from glm52_jax.spec import SCALE_SUFFIX, Stack, Tensor, parameters

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

PLAIN = ("BF16", "F16", "F32")
FLOAT8 = "F8_E4M3"
SCALE_NAMES = (SCALE_SUFFIX, "_scale")  # some tools rename the scale; it multiplies all the same

_FUSED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A published tensor as a folder holds it; `fused` says where an expert is in a tensor that holds all of them."""

    tensor: Tensor
    name: str
    scale: str | None = None
    fused: tuple[int, int | None] | None = None


@dataclasses.dataclass(frozen=True)
class Contents:
    """What `PublishedCheckpoint.check` found.

    Attributes:
        config: the config, without its MTP layer when the folder has no tensor of it.
        tensors: how each tensor of the table is stored, by published name.
        ignored: names of tensors that are not used, with the reason.
        notes: sentences a user should read, for instance that the MTP layer is absent.
    """

    config: ModelConfig
    tensors: dict[str, Stored]
    ignored: dict[str, str]
    notes: tuple[str, ...]


class PublishedCheckpoint:
    """The tensors of a folder, one file or shards with an index. File names do not matter, the index decides.

    Raises:
        InputError: a file is missing or damaged, the index disagrees with the files, a tensor is in two of them.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, SafetensorsFile] = {}
        self.where = self._find()

    def entry(self, name: str) -> Entry:
        return self._files[self.where[name]].entries[name]

    def read(self, name: str) -> np.ndarray:
        """A tensor by its name in the files."""
        return self._files[self.where[name]].read(name)

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            if not (self.folder / SINGLE_FILE).exists():
                raise InputError(f"{self.folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")
            self._files[SINGLE_FILE] = SafetensorsFile(self.folder / SINGLE_FILE)
            return dict.fromkeys(self._files[SINGLE_FILE].entries, SINGLE_FILE)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise InputError(f"{index}: weight_map is missing or not an object of file names")
        self._refuse_absent_files(index, weight_map)
        self._files = {file: SafetensorsFile(self.folder / file) for file in sorted(set(weight_map.values()))}
        self._refuse_disagreement(index, weight_map)
        return weight_map

    def _refuse_absent_files(self, index: Path, weight_map: dict[str, str]) -> None:
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).exists():
                held = [name for name, f in weight_map.items() if f == file]
                raise InputError(
                    f"{index}: names {file}, which is not in the folder; it holds {len(held)} tensors, "
                    f"{held[0]} among them (the download looks incomplete)"
                )

    def _refuse_disagreement(self, index: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self._files[file].entries:
                raise InputError(f"{index}: says that {name} is in {file}, which does not hold it")
        for file, opened in self._files.items():
            for name in opened.entries:
                if name not in weight_map:
                    raise InputError(f"{self.folder / file}: holds {name}, which {INDEX_FILE} does not list")
                if weight_map[name] != file:
                    raise InputError(f"{name} is in two files, {weight_map[name]} and {file}, of {self.folder}")

    def check(self, config: ModelConfig) -> Contents:
        """How each tensor of the table is stored here; refuses what is missing, extra, or of another shape or type.

        Raises:
            InputError: naming the first tensor at fault, what was found and what was expected.
        """
        config, notes = self._with_what_is_here(config)
        left = dict.fromkeys(self.where)
        tensors: dict[str, Stored] = {}
        missing = []
        for param in parameters(config):
            for layer in param.layers(config):
                for tensor in param.published(config, layer):
                    if tensor.name in tensors:
                        continue  # two parameters are made of this one
                    stored = self._stored(tensor, config)
                    if stored is None:
                        if not tensor.optional:
                            missing.append(tensor.name)
                        continue
                    tensors[tensor.name] = stored
                    left.pop(stored.name, None)
                    left.pop(stored.scale or "", None)
                    if tensor.optional:
                        notes.append(f"{tensor.name} is used in place of the model's own")
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(f"{self.folder}: {missing[0]} is missing{more}")
        ignored = {name: reason for name in left if (reason := _ignorable(name, config))}
        self._refuse_extra([name for name in left if name not in ignored])
        return Contents(config, tensors, ignored, tuple(notes))

    def _with_what_is_here(self, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        prefix = f"model.layers.{config.num_hidden_layers}."
        if config.has_mtp and not any(name.startswith(prefix) for name in self.where):
            note = (
                "num_nextn_predict_layers is 1 but the folder has no tensor of the MTP layer "
                f"({prefix}*): the model runs without drafts"
            )
            return config.without_mtp(), [note]
        return config, []

    def _stored(self, tensor: Tensor, config: ModelConfig) -> Stored | None:
        """Finds a tensor under its own name, or an expert inside of a fused one, and checks its shape and type."""
        if tensor.name in self.where:
            self._check_shape(tensor.name, tensor.shape)
            stored = Stored(tensor, tensor.name, self._scale(tensor, config))
        else:
            match = _EXPERT.match(tensor.name)
            if match is None:
                return None
            fused, half = _FUSED[match[3]]
            name = f"{match[1]}.{fused}"
            if name not in self.where:
                return None
            rows, columns = tensor.shape
            self._check_shape(name, (config.n_routed_experts, rows if half is None else 2 * rows, columns))
            stored = Stored(tensor, name, fused=(int(match[2]), half))
        self._check_type(stored)
        return stored

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = self.entry(name).shape
        if found != expected:
            raise InputError(
                f"{self.folder / self.where[name]}: {name} has shape {list(found)}, expected {list(expected)}"
            )

    def _scale(self, tensor: Tensor, config: ModelConfig) -> str | None:
        names = [tensor.name + suffix for suffix in SCALE_NAMES if tensor.name + suffix in self.where]
        if len(names) > 1:
            raise InputError(f"{self.folder}: {tensor.name} has two scales, {names[0]} and {names[1]}")
        if self.entry(tensor.name).dtype != FLOAT8:
            if names:
                raise InputError(
                    f"{self.folder}: {names[0]} is a scale, but {tensor.name} is {self.entry(tensor.name).dtype}, "
                    f"not {FLOAT8}"
                )
            return None
        if not names:
            raise InputError(f"{self.folder}: {tensor.name} is {FLOAT8} but has no {tensor.name}{SCALE_SUFFIX}")
        if config.quantization is None:
            raise InputError(f"{self.folder}: {tensor.name} is {FLOAT8}, but config.json has no quantization_config")
        self._check_shape(names[0], tensor.scale_shape(config.quantization.block))
        if self.entry(names[0]).dtype != "F32":
            raise InputError(f"{self.folder}: {names[0]} is {self.entry(names[0]).dtype}, expected F32")
        return names[0]

    def _check_type(self, stored: Stored) -> None:
        found, tensor = self.entry(stored.name).dtype, stored.tensor
        if tensor.float32:
            expected: tuple[str, ...] = ("F32",)
        elif tensor.quantized and stored.fused is None:
            expected = (FLOAT8,)
        else:
            expected = PLAIN
        if found not in expected:
            file = self.folder / self.where[stored.name]
            raise InputError(f"{file}: {stored.name} is {found}, expected {' or '.join(expected)}")

    def _refuse_extra(self, extra: list[str]) -> None:
        if not extra:
            return
        name = extra[0]
        weight = next((name.removesuffix(s) for s in SCALE_NAMES if name.endswith(".weight" + s)), None)
        if weight:
            raise InputError(f"{self.folder}: {name} is a scale without its weight {weight}")
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(f"{self.folder / self.where[name]}: {name} is not a tensor of this model{more}")


def _ignorable(name: str, config: ModelConfig) -> str | None:
    """Why a tensor that the table does not list may be left alone; None when it may not."""
    match = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies are computed from rope_theta"
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if layer == config.num_hidden_layers and not config.has_mtp:
        return "num_nextn_predict_layers is 0, so the MTP layer is not used"
    shared = layer < config.num_hidden_layers and config.indexer_types[layer] == SHARED
    if shared and inner.startswith("self_attn.indexer."):
        return "the layer is shared: it uses the selection of the last full layer"
    return None


def mtp_tensors(config: ModelConfig) -> list[str]:
    """Names of the parameters that only the MTP layer has."""
    return [p.path for p in parameters(config) if p.stack is Stack.MTP]
