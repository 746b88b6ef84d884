"""Files of a user's: whether one is there, and how one comes to be there whole or not at all.

It must not know what is in them. What is written is flushed before it gets its name, and an error of the system on the
way is an error of the command. Storage that is mounted over a network refuses some of what a local disk does (hard
links, renaming, flushing a folder), and there is another way for each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import BinaryIO

from sharding.errors import InputError

_NOT_SUPPORTED = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_RENAME = {*_NOT_SUPPORTED, errno.EXDEV}
# Mounts that keep no folders have nothing to flush of one; some do not open a folder as a file either.
_NO_FOLDER_SYNC = {*_NOT_SUPPORTED, errno.EINVAL, errno.EBADF, errno.EISDIR, errno.EACCES}
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "the file is too large"}


def is_there(path: Path) -> bool:
    """Whether there is a file or a folder of this name.

    Raises:
        InputError: there is a link that leads nowhere, which is not the same as no file (it is what is left in a cache
            whose contents were deleted), or the system does not say.
    """
    try:
        os.stat(path)
    except OSError as error:
        link = dead_link(path)
        if link is not None:
            raise InputError(f"{path}: {link}") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return False
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return True


def dead_link(path: Path) -> str | None:
    """What is wrong with a link that leads nowhere; None where it is a good link, or none."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"is a link to {target}, where there is no such file"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"is a link to {target}, which leads back to itself"
        return f"is a link to {target}, which cannot be read ({error.strerror})"
    return None


def refuse_dead_links(folder: Path, suffixes: Collection[str]) -> None:
    """Refuses a folder with a link that leads nowhere under a name with one of these suffixes.

    Raises:
        InputError: naming the link and where it leads.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            link = dead_link(folder / entry.name) if entry.name.endswith(tuple(suffixes)) else None
            if link is not None:
                raise InputError(f"{folder / entry.name}: {link}")


def unwritable(place: Path, error: OSError, then: str = "") -> InputError:
    """What to say when something cannot be written; `then` is what a user can do."""
    reason = _FULL.get(error.errno or 0, error.strerror or str(error))
    named = error.filename if isinstance(error.filename, str | os.PathLike) else place
    return InputError(f"{os.fspath(named)}: cannot be written, {reason}{'; ' * bool(then)}{then}")


@contextlib.contextmanager
def writing(place: Path) -> Generator[None]:
    """Turns errors of the system into a sentence that names the place."""
    try:
        yield
    except OSError as error:
        raise unwritable(place, error) from None


@contextlib.contextmanager
def reading(place: Path) -> Generator[None]:
    """The same where something is read."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{place}: {dead_link(place) or f'cannot be read ({error.strerror or error})'}") from None


def check_file(path: Path) -> None:
    """Refuses a file that could not be written, before the work whose result it is to hold.

    Raises:
        InputError: it is a folder, or the system does not let it be written; a file that is there stays as it is.
    """
    with writing(path):
        if path.is_dir():
            raise InputError(f"{path}: is a folder, expected the name of a file")
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # which says that a name is too long
        if not path.is_file():
            if path.exists():  # a device or a pipe
                return
            part = _part(path)
            try:
                with part.open("xb"):
                    pass
                part.unlink()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            return
        with path.open("r+b"):
            pass


def check_folder(path: Path) -> None:
    """Makes a folder for results, and refuses one that nothing could be written to, before there are any.

    Raises:
        InputError: it cannot be made, is a file, or the system lets no file be made there.
    """
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise InputError(f"{path}: is a file, expected a folder") from None
        with tempfile.TemporaryFile(dir=path):
            pass


def _part(path: Path) -> Path:
    """The file beside it that gets its name; a short one, where its own may be as long as a name can be."""
    return path.with_name(f"glm52-{secrets.token_hex(4)}.part")


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write to, which gets its name when it is whole and on disk; nothing is left of one that fails.

    Raises:
        OSError: it cannot be written, flushed or renamed.
    """
    part = _part(path)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the name could reach the disk before the data
        move(part, path)
        sync([path.parent])
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def move(part: Path, path: Path) -> None:
    """Gives a finished file its name, in place of one that has it; copies it where it cannot be renamed."""
    try:
        os.replace(part, path)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        _copy(part, path)
        part.unlink()


def _copy(part: Path, path: Path) -> None:
    near = _part(path)
    try:
        shutil.copyfile(part, near)
        sync([near])
        os.replace(near, path)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        shutil.copyfile(part, path)
        sync([path])
    finally:
        with contextlib.suppress(OSError):
            near.unlink(missing_ok=True)


def create_once(path: Path, data: bytes) -> None:
    """Makes a small file; where another process made it first, that one stays.

    Its content is there at once where the file system has hard links. Elsewhere another process may see a part of it,
    or none, for a moment; and the part stays if this process ends in that moment.
    """
    own = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        _write(own, data)
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        except OSError:  # whatever it is: if the disk is at fault, writing will say so
            with contextlib.suppress(FileExistsError):
                _write(path, data)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def sync(paths: Iterable[Path]) -> None:
    """Waits until files, and the names in folders, are on disk.

    Raises:
        OSError: the system cannot say that they are; of a folder, only if it tried.
    """
    for path in paths:
        folder = path.is_dir()
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            if not (folder and error.errno in _NO_FOLDER_SYNC):
                raise
