"""A published folder in a bucket or on the Hugging Face hub, read in ranges: nothing of it is kept.

A local folder stands for it: config and tokenizer as they are, and of each safetensors file the header alone, in a
sparse file of the right size. So it is checked like any other folder; only values are asked for from afar.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from glm52_jax.checkpoint.sources.published import INDEX_FILE, PublishedCheckpoint
from glm52_jax.checkpoint.sources.sidecar_files import is_sidecar_file
from glm52_jax.io.files import unwritable
from sharding.errors import InputError

READ_AHEAD = 32 * 2**20
"""Bytes of a request, where a tensor has as many: a request takes longer to arrive than a few megabytes."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)
_HEADER_LIMIT = 100_000_000
_PAUSES = (1.0, 4.0, 16.0)  # seconds before a request is made again
Got = TypeVar("Got")


def remote_url(source: str) -> str | None:
    """The URL of a source that is no local folder: a hub id such as `zai-org/GLM-5.2` is one without its scheme."""
    if "://" in source:
        return None if source.startswith("file://") else source
    # A name below a file cannot be a repository of the hub.
    if _HUB.fullmatch(source) and not os.path.lexists(source) and not os.path.isfile(source.split("/")[0]):
        return f"hf://{source}"
    return None


class RemoteCheckpoint(PublishedCheckpoint):
    """Attributes:
    name: the URL, for sentences and commands; `folder` is what stands for it here.
    """

    read_ahead = READ_AHEAD

    def __init__(self, url: str, folder: Path, files: Any, root: str):
        super().__init__(folder)
        self.name, self._files_there, self._root = url, files, root
        self._block = _Block()

    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from `offset` on."""
        entry, file = self.entry(name), self.where[name]
        start = entry.start + offset
        stop = start + len(out)
        block = self._block
        if block.file != file or not block.start <= start <= stop <= block.start + len(block.data):
            block.data = b""  # or two of them would be held
            end = max(stop, min(entry.stop, start + READ_AHEAD))
            path = f"{self._root}/{file}"
            block.data = _request(path, lambda: self._files_there.cat_file(path, start=start, end=end))
            block.file, block.start = file, start
            if len(block.data) != end - start:
                raise InputError(f"{path}: gave {len(block.data)} bytes from {start} on, expected {end - start}")
        at = start - block.start
        out[:] = memoryview(block.data)[at : at + len(out)]


class _Block(threading.local):
    """What a thread asked for last."""

    file: str | None = None
    start = 0
    data = b""


@contextlib.contextmanager
def open_remote(url: str) -> Generator[RemoteCheckpoint, None, None]:
    """A checkpoint at a URL that fsspec knows: `gs://`, `s3://`, `hf://`, `memory://`, ...

    Raises:
        InputError: the package for such a URL is not installed; it cannot be read; it holds no checkpoint. Sentences
            name the URL, not the folder that stands for it, those of the body of `with` too.
    """
    with tempfile.TemporaryDirectory(prefix="glm52-source-") as place:
        try:
            files, root = _file_system(url)
            _stand_in(files, root, Path(place))
            yield RemoteCheckpoint(url, Path(place), files, root)
        except OSError as error:
            raise unwritable(Path(place), error, "its headers and small files are kept there for the time") from None
        except InputError as error:
            raise InputError(str(error).replace(place, url)) from None


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec.core

        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise InputError(
            f"{url}: cannot be read without another package ({error}); pip install 'glm52-jax[hub]' has those for hf://"
        ) from None
    except ValueError as error:
        raise InputError(f"{url}: is no place that can be read ({error})") from None
    return files, root.rstrip("/")


def _stand_in(files: Any, root: str, place: Path) -> None:
    listed = _request(root, lambda: files.ls(root, detail=True))
    entries = [(e["name"].rsplit("/", 1)[-1], e["size"]) for e in listed if e["type"] == "file"]

    def fetch(entry: tuple[str, int]) -> None:
        name, size = entry
        path = f"{root}/{name}"
        if name.endswith(".safetensors"):
            start = _request(path, lambda: files.cat_file(path, start=0, end=min(8, size)))
            length = int.from_bytes(start, "little")
            if len(start) == 8 and length <= min(_HEADER_LIMIT, size - 8):
                start += _request(path, lambda: files.cat_file(path, start=8, end=8 + length))
            with (place / name).open("wb") as file:
                file.write(start)
                file.truncate(size)
        elif name in ("config.json", INDEX_FILE) or is_sidecar_file(name, size):
            (place / name).write_bytes(_request(path, lambda: files.cat_file(path)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, entries))


def _request(path: str, ask: Callable[[], Got]) -> Got:
    """Asks again after a pause; what is not there will not be there then."""
    for pause in (*_PAUSES, None):
        try:
            return ask()
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"{path}: is not there") from None
        except Exception as error:  # each file system has its own
            if pause is None:
                raise InputError(f"{path}: can no longer be read ({error!r})") from None
            time.sleep(pause)
    raise AssertionError("unreachable")
