"""Writes `tests/data/files_of_a_version.tar.gz`: what this version of the project leaves on a disk.

Run it before a release, and check the archive in: `python -m tests.checkpoint.make_version_files`. The next version has
to load, convert and go on with these files, see `test_version_before.py`.
"""

import dataclasses
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.text import write_byte_tokenizer
from tests.model.tiny import random_params, tiny

ARCHIVE = Path(__file__).parents[1] / "data" / "files_of_a_version.tar.gz"


def glm52(*arguments: object) -> None:
    """Runs a command of this version."""
    subprocess.run([sys.executable, "-m", "glm52_jax", *map(str, arguments)], check=True)


def make(folder: Path) -> None:
    """A published folder, one converted from it, and a conversion of which one of two processes has done its part."""
    config = tiny(num_hidden_layers=2, indexer_types=("full", "shared"), mlp_layer_types=("dense", "sparse"))
    config = dataclasses.replace(config, vocab_size=320, n_routed_experts=4)
    write_checkpoint(folder / "published", config, random_params(config))
    write_byte_tokenizer(folder / "published", vocab_size=config.vocab_size)
    glm52("convert", folder / "published", folder / "converted")
    glm52("convert", folder / "published", folder / "unfinished", "--process", "1/2", "--unit-size", "8kB")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    """Writes the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        ARCHIVE.parent.mkdir(exist_ok=True)
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            for path in sorted(Path(temporary).iterdir()):
                archive.add(path, path.name, filter=_anonymous)


if __name__ == "__main__":
    main()
