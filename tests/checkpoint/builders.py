"""Small checkpoints for the tests of this folder, and a folder of one that can be damaged."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from glm52_jax.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors
from glm52_jax.checkpoint.sources.published import INDEX_FILE, SINGLE_FILE
from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig
from glm52_jax.params.init import build_tree
from glm52_jax.params.spec import Param

LAYERS, EXPERTS, MTP_LAYER = 5, 8, 5
FP8 = QuantizationConfig((32, 32))  # 48 rows of q_a and kv_a are one block and a half


def small_config(**changes: Any) -> ModelConfig:
    """GLM-5.2-tiny with fewer layers and experts: dense and sparse, full and shared ones, and an MTP layer."""
    small: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "indexer_types": ("full", "full", "shared", "shared", "full"),
        "mlp_layer_types": ("dense", "sparse", "sparse", "sparse", "sparse"),
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "index_topk": 8,
        "vocab_size": 96,
        "eos_token_ids": (90, 91, 95),
        "pad_token_id": 90,
        "dtype": "float32",
    }
    return dataclasses.replace(BUILT_IN["glm-5.2-tiny"], **(small | changes))


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random numpy leaves, norms and biases too, so that no two of them can be mixed up unseen."""
    rng = np.random.default_rng(seed)

    def make(param: Param) -> np.ndarray | None:
        if param.optional:
            return None
        shape = param.stacked_shape(config)
        if param.float32:
            # Values of the released models' size, at which bfloat16 has steps of 1/32.
            return rng.uniform(6.817, 7.063, shape).astype(np.float32)
        if param.init == "normal":
            return (rng.normal(size=shape) * 1.5 / np.sqrt(param.fan_in)).astype(config.dtype)
        return rng.uniform(0.5, 1.5, shape).astype(config.dtype)

    return build_tree(config, make)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by path."""
    leaves: dict[str, Any] = {}
    for name, node in tree.items():
        leaves |= flat(node, f"{prefix}{name}.") if isinstance(node, dict) else {prefix + name: node}
    return leaves


class Folder:
    """A checkpoint folder, read and rewritten file by file."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def files(self) -> list[str]:
        return sorted(f.name for f in self.path.glob("*.safetensors"))

    def file_of(self, tensor: str) -> str:
        return next(f for f in self.files if tensor in SafetensorsFile(self.path / f).entries)

    def tensors(self, file: str | None = None) -> dict[str, np.ndarray]:
        """Copies of the tensors of one file, or of all."""
        opened = [SafetensorsFile(self.path / f) for f in ([file] if file else self.files)]
        return {name: np.array(f.read(name)) for f in opened for name in f.entries}

    def write(self, file: str, tensors: dict[str, np.ndarray]) -> None:
        kinds = {name: (values.dtype, values.shape) for name, values in tensors.items()}
        write_safetensors(self.path / file, kinds, tensors.items())

    def put(self, tensors: dict[str, np.ndarray]) -> None:
        """Adds or replaces tensors, each in the file that has it, or in the last one; the index follows."""
        for name, values in tensors.items():
            file = next((f for f in self.files if name in self.tensors(f)), self.files[-1])
            self.write(file, self.tensors(file) | {name: values})
            self._index(lambda weight_map, name=name, file=file: weight_map | {name: file})

    def drop(self, names: Callable[[str], bool]) -> list[str]:
        """Removes tensors from files and index; says which."""
        dropped = []
        for file in self.files:
            tensors = self.tensors(file)
            gone = [name for name in tensors if names(name)]
            if gone:
                self.write(file, {name: values for name, values in tensors.items() if name not in gone})
            dropped += gone
        self._index(lambda weight_map: {name: f for name, f in weight_map.items() if name not in dropped})
        return dropped

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Renames tensors in files and index."""
        for file in self.files:
            self.write(file, {new_name(name): values for name, values in self.tensors(file).items()})
        self._index(lambda weight_map: {new_name(name): file for name, file in weight_map.items()})

    def edit_json(self, edit: Callable[[dict[str, Any]], Any], file: str = "config.json") -> None:
        """Changes a JSON file in place, or puts what `edit` returns in its place."""
        value = json.loads((self.path / file).read_text())
        result = edit(value)
        (self.path / file).write_text(json.dumps(value if result is None else result))

    def edit_header(self, edit: Callable[[dict[str, Any]], Any], file: str | None = None) -> None:
        """Changes the header of a safetensors file, whose tensors stay as they are."""
        path = self.path / (file or self.files[0])
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        result = edit(header)
        text = json.dumps(header if result is None else result).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    def _index(self, edit: Callable[[dict[str, str]], dict[str, str]]) -> None:
        if (self.path / INDEX_FILE).exists():
            self.edit_json(lambda index: index | {"weight_map": edit(index["weight_map"])}, INDEX_FILE)

    def copy(self, to: Path) -> "Folder":
        shutil.copytree(self.path, to)
        return Folder(to)

    def as_single(self, to: Path) -> "Folder":
        """The same checkpoint in one file."""
        to.mkdir()
        shutil.copy(self.path / "config.json", to)
        single = Folder(to)
        single.write(SINGLE_FILE, self.tensors())
        return single
