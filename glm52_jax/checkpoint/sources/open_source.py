"""Opening a checkpoint, whichever form and place it has, as tensors by their published names."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from glm52_jax.checkpoint.sources.converted import ConvertedCheckpoint, is_converted
from glm52_jax.checkpoint.sources.file_reader import FileReader
from glm52_jax.checkpoint.sources.published import PublishedCheckpoint
from glm52_jax.checkpoint.sources.remote import RemoteCheckpoint, open_remote, remote_url
from glm52_jax.io.unfinished import refuse_unfinished


class PublishedFiles(PublishedCheckpoint):
    """A published folder whose tensors can be read in parts.

    Attributes:
        name: what to call it in a command.
        read_ahead: bytes that a reading thread holds beside its buffer.
    """

    read_ahead = 0

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self.name = str(folder)
        self._last = FileReader()

    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from `offset` on."""
        self._last.read(self.folder / self.where[name], self.entry(name).start + offset, out)


Checkpoint = PublishedFiles | ConvertedCheckpoint | RemoteCheckpoint


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """A published or a converted folder; its headers, or its manifest, are read and compared with the files.

    Raises:
        InputError: it is neither, it is not finished, or a file is missing or damaged.
    """
    folder = Path(folder)
    if is_converted(folder):
        return ConvertedCheckpoint(folder)
    refuse_unfinished(folder)
    return PublishedFiles(folder)


@contextlib.contextmanager
def opened(source: str) -> Generator[Checkpoint, None, None]:
    """A local folder, a URL that fsspec knows, or the id of a repository on the Hugging Face hub.

    Raises:
        InputError: as `open_checkpoint` and `open_remote`.
    """
    url = remote_url(source)
    if url is None:
        yield open_checkpoint(source.removeprefix("file://"))
    else:
        with open_remote(url) as checkpoint:
            yield checkpoint
