"""A folder in the published layout: which tensor is in which file, and whether they are the ones the table asks for.

Opening a folder reads headers only. `PublishedCheckpoint.check` compares them with the parameter table before anything
is loaded, so that a wrong checkpoint is refused in one sentence and before device work.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from glm52_jax.checkpoint.formats.safetensors_file import SafetensorsFile, TensorEntry
from glm52_jax.config import SHARED, ModelConfig
from glm52_jax.io.files import dead_link
from glm52_jax.io.json_fields import read_json, shown
from glm52_jax.params.spec import SCALE_SUFFIX, Tensor, config_notes, parameters
from sharding.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

PLAIN = ("BF16", "F16", "F32")
CODES = ("F8_E4M3", "I8")
SCALE_NAMES = (SCALE_SUFFIX, "_scale")  # some tools rename the scale; it multiplies all the same

_FUSED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
_LISTED = 12
"""Files that a sentence names."""
OPTIONAL = ("embed_tokens.weight", "shared_head.head.weight")  # of the MTP layer, never in codes
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.([0-9]+)\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.*)")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A published tensor as a folder holds it; `fused` says where an expert is in a tensor that holds all of them."""

    tensor: Tensor
    name: str
    scale: str | None = None
    fused: tuple[int, int | None] | None = None  # the expert, and which half of its rows (None for all of them)


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """What `PublishedCheckpoint.check` found.

    Attributes:
        config: the config, without its MTP layer when the folder has no tensor of it.
        tensors: how each tensor of the table is stored, by published name.
        ignored: names of tensors that are not used, with the reason.
        notes: sentences a user should read, for instance that the MTP layer is absent.
    """

    config: ModelConfig
    tensors: dict[str, StoredTensor]
    ignored: dict[str, str]
    notes: tuple[str, ...]


def fused_name(name: str) -> tuple[str, int, int | None] | None:
    """The tensor that holds all experts where one expert's is not stored by itself, the expert, and the half of rows.

    `transformers` keeps experts so in memory, and some of its releases wrote them: `experts.gate_up_proj`
    `[experts, 2 * width, embed]`, gate first, and `experts.down_proj` `[experts, embed, width]`.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    fused, half = _FUSED[match[3]]
    return f"{match[1]}.{fused}", int(match[2]), half


class PublishedCheckpoint:
    """The tensors of a folder, one file or shards with an index. File names do not matter, the index decides.

    Attributes:
        where: the file of each tensor.
        unused: safetensors files of the folder that are no part of the checkpoint.

    Raises:
        InputError: a file is missing or damaged, the index disagrees with the files, a tensor is in two of them.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._listed = _names(self.folder)
        self._files: dict[str, SafetensorsFile] = {}
        self.where = self._indexed() if INDEX_FILE in self._listed else self._single()
        self.unused = [f for f in self._listed if f.endswith(".safetensors") and f not in self._files]

    def entry(self, name: str) -> TensorEntry:
        return self._files[self.where[name]].entries[name]

    def read(self, name: str) -> np.ndarray:
        """A tensor by its name in the files."""
        return self._files[self.where[name]].read(name)

    def check(self, config: ModelConfig) -> CheckpointContents:
        """How each tensor of the table is stored here; refuses what is missing, extra, or of another shape or type.

        Raises:
            InputError: naming the first tensor at fault, what was found and what was expected.
        """
        reason = (
            f"{INDEX_FILE} does not name it" if INDEX_FILE in self._listed else f"without an index {SINGLE_FILE} is all"
        )
        notes = [*config_notes(config), *(f"{file} is not used, since {reason}" for file in self.unused)]
        config, absent = self._with_what_is_here(config)
        tensors: dict[str, StoredTensor] = {}
        missing: list[Tensor] = []
        for tensor in _expected(config):
            stored = self._stored(tensor, config)
            if stored is not None:
                tensors[tensor.name] = stored
            elif not tensor.optional:
                missing.append(tensor)
        self._refuse_missing(missing, config)
        used = {s.name for s in tensors.values()} | {s.scale for s in tensors.values()}
        left = [name for name in self.where if name not in used]
        ignored = {name: reason for name in left if (reason := _ignorable(name, config) or _idle_scale(name, config))}
        self._refuse_extra([name for name in left if name not in ignored], config)
        own = [f"{s.name} is used in place of the model's own" for s in tensors.values() if s.tensor.optional]
        return CheckpointContents(config, tensors, ignored, (*notes, *absent, *own, *_summary(ignored)))

    def _single(self) -> dict[str, str]:
        if SINGLE_FILE not in self._listed:
            raise InputError(f"{self.folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")
        self._files[SINGLE_FILE] = SafetensorsFile(self.folder / SINGLE_FILE)
        return dict.fromkeys(self._files[SINGLE_FILE].entries, SINGLE_FILE)

    def _indexed(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: weight_map is {shown(weight_map)}, expected the file of each tensor")
        for name, file in weight_map.items():
            if not _is_inside(file):
                raise InputError(f"{index}: weight_map has {shown(file)}, expected the name of a file in the folder")
            if not name.isprintable():
                raise InputError(f"{index}: weight_map names a tensor {shown(name)}, expected printable text")
        weight_map = {name: str(PurePosixPath(file)) for name, file in weight_map.items()}  # ./a and a//b have one name
        files = sorted(set(weight_map.values()))
        self._refuse_absent(index, weight_map, files)
        if SINGLE_FILE not in files and SINGLE_FILE in self._listed:
            raise InputError(
                f"{self.folder}: holds {SINGLE_FILE} and {INDEX_FILE}, which does not name it, expected one of them "
                "(programs differ in which they read)"
            )
        self._files = {file: SafetensorsFile(self.folder / file) for file in files}
        self._refuse_disagreement(index, weight_map)
        return weight_map

    def _refuse_absent(self, index: Path, weight_map: dict[str, str], files: list[str]) -> None:
        absent = [file for file in files if not os.path.exists(self.folder / file)]
        if not absent:
            return
        link = dead_link(self.folder / absent[0])
        if link is not None:
            raise InputError(f"{index}: names {absent[0]}, which {link}; so it is not in the folder")
        held = [name for name, file in weight_map.items() if file == absent[0]]
        whole = [file for file in self._listed if file not in files and _is_whole(self.folder / file)]
        if whole:
            verb = "is" if len(whole) == 1 else "are"
            raise InputError(
                f"{index}: is stale; it names {_listing(absent)}, not in the folder, and does not name "
                f"{_listing(whole)}, which {verb} there and whole; expected the index that belongs to the files"
            )
        files_are = (
            f"{absent[0]}, which is" if len(absent) == 1 else f"{absent[0]} and {len(absent) - 1} more, which are"
        )
        raise InputError(
            f"{index}: names {files_are} not in the folder; {absent[0]} should hold {len(held)} tensors, {held[0]} "
            "among them (the download looks incomplete)"
        )

    def _refuse_disagreement(self, index: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self._files[file].entries:
                holder = next((other for other, opened in self._files.items() if name in opened.entries), None)
                where = f"; {holder} does, so the index is stale" if holder else ""
                raise InputError(f"{index}: says that {name} is in {file}, which does not hold it{where}")
        for file, opened in self._files.items():
            for name in opened.entries:
                if name not in weight_map:
                    raise InputError(f"{self.folder / file}: holds {name}, which {INDEX_FILE} does not list")
                if weight_map[name] != file:
                    raise InputError(f"{self.folder}: {name} is in two files, {weight_map[name]} and {file}")

    def _with_what_is_here(self, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        prefix = f"model.layers.{config.num_hidden_layers}."
        if config.has_mtp and not any(n.startswith(prefix) and not _idle_scale(n, config) for n in self.where):
            note = (
                "num_nextn_predict_layers is 1 but the folder has no tensor of the MTP layer "
                f"({prefix}*): the model runs without drafts"
            )
            return config.without_mtp(), [note]
        return config, []

    def _stored(self, tensor: Tensor, config: ModelConfig) -> StoredTensor | None:
        """Finds a tensor under its own name, or an expert inside of a fused one, and checks its shape and type."""
        fused = fused_name(tensor.name)
        if tensor.name in self.where:
            self._check_shape(tensor.name, tensor.shape)
            self._check_type(tensor.name, tensor, config)
            return StoredTensor(tensor, tensor.name, self._scale(tensor, config))
        if fused is None or fused[0] not in self.where:
            return None
        name, expert, half = fused
        rows, columns = tensor.shape
        self._check_shape(name, (config.n_routed_experts, rows if half is None else 2 * rows, columns))
        # No release and no known tool has fused experts in codes.
        self._check_type(name, dataclasses.replace(tensor, quantized=False), config)
        return StoredTensor(tensor, name, fused=(expert, half))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = self.entry(name).shape
        if found != expected:
            raise InputError(
                f"{self.folder / self.where[name]}: {name} has shape {list(found)}, expected {list(expected)}"
            )

    def _check_type(self, name: str, tensor: Tensor, config: ModelConfig) -> None:
        found, file = self.entry(name).dtype, self.folder / self.where[name]
        quantization = config.quantization
        expected = ("F32",) if tensor.float32 else PLAIN
        if tensor.quantized and quantization is not None:
            expected = (quantization.codes,)
        if found in CODES and quantization is None:
            raise InputError(f"{file}: {name} is {found}, but config.json has no quantization_config")
        if found not in expected:
            listed = ", as quantization_config does not except it" if tensor.quantized and found in PLAIN else ""
            raise InputError(f"{file}: {name} is {found}, expected {' or '.join(expected)}{listed}")

    def _scale(self, tensor: Tensor, config: ModelConfig) -> str | None:
        """The name of the scale of a tensor of codes."""
        if self.entry(tensor.name).dtype not in CODES:
            return None
        assert config.quantization is not None
        names = [tensor.name + suffix for suffix in SCALE_NAMES]
        found = [name for name in names if name in self.where]
        if len(found) > 1:
            raise InputError(f"{self.folder}: {tensor.name} has two scales, {found[0]} and {found[1]}")
        if not found:
            raise InputError(
                f"{self.folder / self.where[tensor.name]}: {tensor.name} is {self.entry(tensor.name).dtype} but has no "
                f"scale, expected {' or '.join(names)}"
            )
        self._check_shape(found[0], tensor.scale_shape(config.quantization.block))
        if self.entry(found[0]).dtype != "F32":
            file = self.folder / self.where[found[0]]
            raise InputError(f"{file}: {found[0]} is {self.entry(found[0]).dtype}, expected F32")
        return found[0]

    def _refuse_missing(self, missing: list[Tensor], config: ModelConfig) -> None:
        if not missing:
            return
        first = missing[0]
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = ""
        if first.name.startswith(f"model.layers.{config.num_hidden_layers}."):
            hint = "; the MTP layer is there in part (with num_nextn_predict_layers 0 the model runs without it)"
        raise InputError(
            f"{self.folder}: {first.name} is missing, expected it with shape {list(first.shape)}{more}{hint}"
        )

    def _refuse_extra(self, extra: list[str], config: ModelConfig) -> None:
        if not extra:
            return
        file, name = self.folder / self.where[extra[0]], extra[0]
        weight = next((name.removesuffix(s) for s in SCALE_NAMES if name.endswith(".weight" + s)), None)
        if weight is not None and weight in self.where:
            raise InputError(
                f"{file}: {name} is a scale, but {weight} is {self.entry(weight).dtype}, not {' or '.join(CODES)}"
            )
        if weight is not None:
            raise InputError(f"{file}: {name} is a scale without its weight {weight}")
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        layers = f"{config.num_hidden_layers} layers{' and an MTP layer' * config.has_mtp}"
        raise InputError(f"{file}: {name} is not a tensor of this model, which has {layers}{more}")


def _names(folder: Path) -> list[str]:
    """Names of what is in a folder, sorted."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        problem = dead_link(folder) or "no such folder"
        raise InputError(f"{folder}: {problem}, expected one with config.json and safetensors files") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None


def _listing(files: list[str]) -> str:
    more = len(files) - _LISTED
    return ", ".join(files[:_LISTED]) + f" and {more} more" * (more > 0)


def _is_whole(path: Path) -> bool:
    """Whether a file is a safetensors file to its end."""
    if path.suffix != ".safetensors":
        return False
    try:
        SafetensorsFile(path)
    except InputError:
        return False
    return True


def _expected(config: ModelConfig) -> Iterator[Tensor]:
    """Every published tensor of the table once, those of optional parameters too."""
    seen: set[str] = set()
    for param in parameters(config):
        for layer in param.layers(config):
            for tensor in param.published(config, layer):
                if tensor.name not in seen:  # two parameters can be made of one
                    seen.add(tensor.name)
                    yield tensor


def _is_inside(file: object) -> bool:
    """Whether an index's entry names a file in the folder: one from elsewhere is no part of the checkpoint."""
    if not isinstance(file, str) or not file or not file.isprintable():
        return False
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _ignorable(name: str, config: ModelConfig) -> str | None:
    """Why a tensor that the table does not list may be left alone; None when it may not."""
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies are computed from rope_theta"
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if layer == config.num_hidden_layers and not config.has_mtp:
        return "num_nextn_predict_layers is 0, so the MTP layer is not used"
    shared = layer < config.num_hidden_layers and config.indexer_types[layer] == SHARED
    if shared and inner.startswith("self_attn.indexer."):
        return "the layer is shared: it uses the selection of the last full layer"
    return None


def _idle_scale(name: str, config: ModelConfig) -> str | None:
    """Why the scale of a tensor that is never in codes may be left alone; None for another one.

    Some writers leave them behind with tensors of the MTP layer that they take out, or store in plain form.
    """
    weight = next((name.removesuffix(suffix) for suffix in SCALE_NAMES if name.endswith(suffix)), None)
    if weight is None:
        return None
    if reason := _ignorable(weight, config):
        return reason
    prefix = f"model.layers.{config.num_hidden_layers}."
    if config.has_mtp and weight.removeprefix(prefix) in OPTIONAL and weight.startswith(prefix):
        return "it is a scale of a tensor that is always plain"
    return None


def _summary(ignored: dict[str, str]) -> list[str]:
    """A sentence a reason."""
    first = {reason: name for name, reason in reversed(ignored.items())}
    return [
        f"{count} {'tensor is' if count == 1 else 'tensors are'} not used, {first[reason]} among them: {reason}"
        for reason, count in Counter(ignored.values()).items()
    ]
