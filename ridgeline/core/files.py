"""Writing so that a crash, a full disk or Ctrl-C leaves the previous good state.

A file is written under a temporary name beside its place, flushed to disk and renamed; a folder is
filled under a temporary name and renamed. What is not finished is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ridgeline.core.errors import UserError


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write a file to; publish it at `path` when the block ends well.

    Raises: UserError when the disk refuses (full, read-only); nothing is left behind then.
    """
    path = Path(path)
    with _told_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise UserError(f"write: could not write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path | str, text: str) -> None:
    """Write text (UTF-8) to `path`, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_dir(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; publish it at `path` when the block ends well.

    With `overwrite` an existing folder is replaced (moved aside first, then removed).
    Raises: UserError when `path` exists and may not be replaced, or when the disk refuses.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise UserError(f"write: {path} exists already; choose another folder or pass --overwrite")
    with _told_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    aside = temporary.with_suffix(".old")
    try:
        yield temporary
        mask = _umask()
        for file in temporary.rglob("*"):
            if file.is_file():
                os.chmod(file, 0o666 & ~mask)  # safetensors makes its files 0600
                with open(file, "rb+") as written:
                    os.fsync(written.fileno())
        os.chmod(temporary, 0o777 & ~mask)
        if path.exists():
            os.replace(path, aside)
        os.replace(temporary, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise UserError(f"write: could not write {path}: {error.strerror or error}") from error
    finally:
        if aside.exists() and not path.exists():  # stopped between the two renames, however
            os.replace(aside, path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _told_as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"write: could not write {path}: {error.strerror or error}") from error


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
