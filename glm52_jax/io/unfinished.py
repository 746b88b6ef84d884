"""How a checkpoint's folder says that it is not finished, for whoever opens one; `checkpoint.work_folder` writes it.

It must not know what the work is.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from glm52_jax.io.files import is_there
from sharding.errors import InputError

UNFINISHED, SETTINGS, MANIFEST = "unfinished", "settings.json", "manifest.json"
FORMAT, COMMAND = "glm52-unfinished", "command"


def settings_of(folder: Path) -> dict[str, Any] | None:
    """What the work on a folder was begun with; None where none was, or not by this project."""
    work = folder / UNFINISHED
    try:
        if work.is_symlink() or not stat.S_ISREG((work / SETTINGS).lstat().st_mode):
            return None
        found = json.loads((work / SETTINGS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def not_finished(folder: Path) -> InputError:
    """What a reader says of a folder that is not finished."""
    begun = settings_of(folder)
    command = f"`{begun.get(COMMAND)}`" if begun else "the command that began it"
    return InputError(f"{folder}: is not finished; {command} goes on where it was stopped")


def refuse_unfinished(folder: Path) -> None:
    """Refuses a folder that a conversion or an export has begun to write.

    Raises:
        InputError: with the command that goes on.
    """
    if settings_of(folder) is not None and not is_there(folder / MANIFEST):
        raise not_finished(folder)
