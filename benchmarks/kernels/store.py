"""CaseStats in a JSON file, written after every case, so that an interrupted run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from benchmarks.kernels.stats import CaseStats
from sharding.errors import InputError


class Store:
    """CaseStats by their key.

    Args:
        path: of the file, or None to keep them in memory alone.
        keep: whether figures count that were made from other sources than those of now; refusals never do.
    """

    def __init__(self, path: Path | None, keep: bool = False):
        self._path, self._keep = path, keep
        self._found: dict[str, CaseStats] = {}
        if path is not None and path.exists():
            try:
                stored = json.loads(path.read_text())
                self._found = {one.key: one for one in map(CaseStats.from_json, stored)}
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{path} holds no figures of kernels ({error})") from error

    def get(self, key: str, digest: str) -> CaseStats | None:
        found = self._found.get(key)
        if found is None or (found.digest != digest and (found.refusal or not self._keep)):
            return None
        return found

    def put(self, stats: CaseStats) -> None:
        self._found[stats.key] = stats
        if self._path is None:
            return
        text = json.dumps([dataclasses.asdict(one) for one in self._found.values()], indent=1)
        half = self._path.with_name(self._path.name + ".half")
        half.write_text(text + "\n")
        os.replace(half, self._path)
