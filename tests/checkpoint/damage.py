"""Ways to damage a checkpoint, and what the sentence that refuses it must say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm52_jax.checkpoint.load import loader
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.checkpoint.sources.published import INDEX_FILE
from sharding.errors import InputError
from tests.checkpoint.builders import Folder

Damage = Callable[[Folder], Any]


class Cases:
    """A table of damages: what is done to which checkpoint, and fragments of the sentence."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, folder: str, *fragments: str) -> Callable[[Damage], Damage]:
        """Adds the function it decorates; `folder` is the fixture "fp8" (shards and index) or "plain" (one file)."""

        def row(damage: Damage) -> Damage:
            self.rows.append(pytest.param(folder, damage, fragments, id=damage.__name__))
            return damage

        return row


def assert_refused(folder: Folder, fragments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it is one sentence that names the folder, before any array is made."""
    for module, maker in ((loader.jnp, "asarray"), (loader.jax, "device_put")):
        monkeypatch.setattr(module, maker, lambda *_, **__: pytest.fail("an array was made before the check"))
    with pytest.raises(InputError) as error:
        load_params(folder.path)
    sentence = str(error.value)
    assert sentence.startswith(str(folder.path))
    assert "\n" not in sentence
    for fragment in fragments:
        assert fragment in sentence


def cut(path: Path, size: int) -> None:
    """Truncates a file to a size, or by one when it is negative."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def replace(folder: Folder, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    folder.put({name: change(folder.tensors()[name])})


def weight_map(folder: Folder, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the file of each tensor in the index."""
    folder.edit_json(lambda index: edit(index["weight_map"]), INDEX_FILE)


def header_entry(folder: Folder, name: str, **fields: Any) -> None:
    """Changes what the header of a safetensors file says of a tensor."""
    folder.edit_header(lambda header: header[name].update(fields), folder.file_of(name))
