"""JSON objects in files: read with errors that name the file, written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from glm52_jax.io.files import dead_link, is_there, whole_file, writing
from sharding.errors import InputError


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`; `InputError` when it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: {dead_link(path) or 'no such file'}, expected it in a checkpoint's folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: could not be read as UTF-8 text ({error})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `InputError` when it is missing, broken or another kind of value."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: found text that is not JSON ({error}), expected a JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: found a JSON {type(value).__name__}, expected a JSON object")
    return value


def write_json_object(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path` whole or not at all; `InputError` when it is there with another content."""
    data = (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
    with writing(path):
        if is_there(path):
            if path.is_file() and path.read_bytes() == data:
                return
            raise InputError(f"{path}: is there already with another content, expected no such file")
        with whole_file(path) as file:
            file.write(data)
