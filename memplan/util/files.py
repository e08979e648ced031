"""Files: written whole or not at all, and JSON whose reader never breaks on a damaged one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import sys
import time
from pathlib import Path
from typing import Any, TextIO

# Drafts lie beside their target as ".NAME.XXXXXXXX.memplan-draft". One older than this belongs to
# a process that was killed while it wrote.
DRAFT = ".memplan-draft"
STALE_SECONDS = 3600.0

# Of a draft's name, what the target's may take: file systems allow 255 bytes in all.
_MAX_STEM = 60


def parse_json(text: str, *, strict: bool = True) -> Any:
    """What the JSON ``text`` holds; ValueError for any that is damaged, however deep it nests.

    Strings may have line ends and the like in them unless ``strict``.
    """
    try:
        return json.loads(text, strict=strict)
    except RecursionError:
        raise ValueError("it nests too deep for JSON that memplan wrote") from None


def damage(error: Exception) -> str:
    """What is wrong with data from JSON by which ``error`` was raised, in words."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error) or type(error).__name__


def unwritten(error: Exception) -> str:
    """Why something could not be written where it was to be, in words, and what to do."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if name is not None and not Path(name).parent.exists():
        return "its folder is missing; make that first"
    if isinstance(error, TypeError):  # for what is no path
        return "give a name, as a string or a Path"
    return str(getattr(error, "strerror", None) or error)


def read_json(path: Path) -> Any:
    """What the JSON in the file holds; OSError if it cannot be read, ValueError if damaged."""
    return parse_json(path.read_text(encoding="utf-8"))


def check_names_a_file(path: str | os.PathLike[str]) -> None:
    """OSError for a path that no file can have: that of a folder, or of links in a circle.

    "name/" names a folder, though a :class:`Path` made of it does not.
    """
    if not os.path.basename(path) or os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "it names a folder", os.fspath(path))
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8, as :func:`write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path``, all of it or nothing; OSError if it cannot be.

    It is on the disk before it takes its place. A file that is there keeps its permissions,
    a link stays a link to what is written, and what is no file (/dev/null) is written to, not
    replaced; so is a file that stdout or stderr goes to (/dev/stdout), with what it has already.
    Drafts that killed processes left beside it are deleted.
    """
    check_names_a_file(path)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and _goes_to(stream, Path(path)):
            stream.flush()
            with os.fdopen(os.dup(stream.fileno()), "wb") as file:
                file.write(content)
            return
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(content)
        return
    # Only of a file: where a link leads to a pipe (/dev/stdout), its end is no path.
    target = Path(os.path.realpath(path))
    _sweep(target.parent)
    draft = target.with_name(f".{_start(target.name)}.{secrets.token_hex(8)}{DRAFT}")
    try:
        with draft.open("xb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
        _flush_folder(target.parent)
    except OSError as error:
        # The user knows of no draft.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        # Nothing is left of it once it has been renamed.
        with contextlib.suppress(OSError):
            draft.unlink()


def _goes_to(stream: TextIO, target: Path) -> bool:
    """Does what is written to ``stream`` go to the file ``target``?"""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), target.stat())
    except (OSError, ValueError):  # it is closed, or there is no such file yet
        return False


def _start(name: str) -> str:
    """The first bytes of ``name``, for people who meet a draft."""
    return os.fsencode(name)[:_MAX_STEM].decode(sys.getfilesystemencoding(), "ignore")


def _flush_folder(folder: Path) -> None:
    """Bring the new name to the disk, where the file system can (on some it cannot)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Delete the drafts of processes that were killed."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(f".*{DRAFT}"):
            with contextlib.suppress(OSError):
                if time.time() - draft.stat().st_mtime > STALE_SECONDS:
                    draft.unlink()
