"""Reading byte ranges of files into buffers: no mapping, since a file that is cut while mapped ends the process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from glm52_jax.io.files import dead_link
from sharding.errors import InputError


class FileReader(threading.local):
    """The file that a thread read last, still open, since values are read from front to back."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.number = -1

    def read(self, path: Path, offset: int, out: memoryview) -> None:
        try:
            if self.path != path:
                self.close()
                self.number = os.open(path, os.O_RDONLY)
                self.path = path
            done = 0
            while done < len(out):
                count = os.preadv(self.number, [out[done:]], offset + done)
                if count == 0:
                    size = os.fstat(self.number).st_size
                    raise InputError(f"{path}: {size} bytes, too short to hold bytes up to {offset + len(out)}")
                done += count
        except OSError as error:
            raise InputError(f"{path}: {dead_link(path) or f'can no longer be read ({error.strerror})'}") from None

    def close(self) -> None:
        if self.path is not None:
            os.close(self.number)
            self.path = None

    def __del__(self) -> None:
        self.close()
