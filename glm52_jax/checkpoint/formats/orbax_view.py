"""A converted checkpoint as Orbax itself sees it, so that a change of its format, or of Orbax, is noticed.

Orbax runs in a process of its own, on the CPU: it starts JAX's backends, which in this process could take the devices
of another one, and its memory goes with it. This process imports neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.formats.orbax_layout import StoredLeaf
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES

_SECONDS = 600
_LISTED = 3


class OrbaxView:
    """Orbax at work on a checkpoint: started at once, asked for what it found later.

    Args:
        params: the folder that Orbax restores.
        leaves: the arrays that it should find, by name.
    """

    def __init__(self, params: Path, leaves: Mapping[str, StoredLeaf]):
        self._params, self._leaves = params, leaves
        whole = [leaf for leaf in leaves.values() if not leaf.stacked] or list(leaves.values())
        self._smallest = min(whole, key=lambda leaf: (leaf.chunk_bytes, leaf.name))
        own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        paths = os.pathsep.join(path for path in sys.path if path)
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(params.resolve()), self._smallest.name],
            env=own | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def differences(self) -> list[str]:
        """A sentence for each way in which what Orbax sees is not what it should see; waits for it."""
        try:
            output, errors = self._child.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            return [f"{self._params}: Orbax did not read it within {_SECONDS} s"]
        lines = output.splitlines()
        if self._child.returncode or not lines:
            reason = errors.strip().splitlines()[-1:] or [f"it ended with {self._child.returncode}"]
            return [f"{self._params}: Orbax does not read it ({reason[0]})"]
        found: dict[str, Any] = json.loads(lines[-1])
        expected = {name: [str(DTYPES[leaf.dtype]), list(leaf.shape)] for name, leaf in self._leaves.items()}
        arrays = found["arrays"]
        differences = [
            f"{self._params}: to Orbax {name} is {_said(arrays.get(name))}, expected {_said(expected.get(name))}"
            for name in sorted({*expected, *arrays})
            if arrays.get(name) != expected.get(name)
        ]
        more = len(differences) - _LISTED
        if not differences and found["crc32"] != self._crc32():
            differences = [f"{self._params}: Orbax reads other values of {self._smallest.name} than its chunks hold"]
        return [*differences[:_LISTED], *[f"{self._params}: to Orbax {more:,} more arrays differ"] * (more > 0)]

    def end(self) -> None:
        """Gives up; after `differences` there is nothing to end."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.communicate()

    def _crc32(self) -> int:
        crc = 0
        for expert in range(self._smallest.shape[0]) if self._smallest.stacked else [None]:
            for file in self._smallest.files(expert):
                crc = zlib.crc32((self._params / file).read_bytes(), crc)
        return crc


def _said(array: list[Any] | None) -> str:
    return "not there" if array is None else f"{array[0]} {array[1]}"


def main() -> None:
    """In the process of its own: prints types and shapes of all arrays, and the checksum of the values of one."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    params, name = Path(sys.argv[1]), sys.argv[2]
    with ocp.StandardCheckpointer() as checkpointer:
        found = jax.tree.leaves(checkpointer.metadata(params).item_metadata)
    (leaf,) = [leaf for leaf in found if leaf.name == name]
    asked: Any = jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    for key in reversed(name.split(".")):
        asked = {key: asked}
    with ocp.PyTreeCheckpointer() as checkpointer:
        how = ocp.checkpoint_utils.construct_restore_args(asked)
        restored = checkpointer.restore(
            params, args=ocp.args.PyTreeRestore(item=asked, restore_args=how, partial_restore=True)
        )
    (values,) = jax.tree.leaves(restored)
    arrays = {leaf.name: [str(np.dtype(leaf.dtype)), list(leaf.shape)] for leaf in found}
    print(json.dumps({"arrays": arrays, "crc32": zlib.crc32(np.asarray(values).tobytes())}), flush=True)
