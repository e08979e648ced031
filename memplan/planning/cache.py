"""Texts kept in a folder, one file each: what a long search found, for the next time."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from memplan.errors import ArgumentError
from memplan.util.files import damage, read_json, unwritten, write_text
from memplan.util.numbers import shown

FORMAT = "memplan.planning.cache/1"


def digest(text: str) -> str:
    """A name for ``text`` that no other text has."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder of entries, which processes may share.

    An entry is there whole or not at all: it is written beside its place, then renamed. One that
    is damaged all the same (its checksum tells) counts as missing, with a warning.
    """

    folder: Path

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Cache:
        """The cache in ``folder`` ("~" is the home), made if missing; ArgumentError if it fails."""
        try:
            if isinstance(folder, str) and not folder:
                raise ValueError("no name is the current folder's, which is '.'")
            path = Path(folder).expanduser()
            path.mkdir(parents=True, exist_ok=True)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            name = repr(str(folder)) if isinstance(folder, str | os.PathLike) else shown(folder)
            raise ArgumentError(
                f"cache must be a folder that can be written, got {name}: {unwritten(error)}"
            ) from error
        return cls(path)

    def path(self, key: str) -> Path:
        """The file of the entry ``key`` (any text)."""
        return self.folder / f"{digest(key)}.json"

    def find(self, key: str) -> str | None:
        """The text kept as ``key``, or None."""
        path = self.path(key)
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")  # a pipe would be waited for
            data = read_json(path)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
            text = str(data["text"])
            if data["key"] != digest(key) or data["checksum"] != digest(text):
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError) as error:
            self.distrust(key, damage(error))
            return None
        return text

    def distrust(self, key: str, reason: str) -> None:
        """Warn that the entry ``key`` is of no use; what is found anew takes its place."""
        warnings.warn(
            f"the plan kept in {str(self.path(key))!r} cannot be used and is made anew: {reason}",
            stacklevel=2,
        )

    def keep(self, key: str, text: str) -> None:
        """Write the entry; a full or read-only disk is a warning, for the plan is there."""
        data = {"format": FORMAT, "key": digest(key), "checksum": digest(text), "text": text}
        try:
            if not self.path(key).is_file():  # what is no regular file would be written to
                self.path(key).unlink(missing_ok=True)
            write_text(self.path(key), json.dumps(data))
        except OSError as error:
            warnings.warn(
                f"a plan could not be kept in {str(self.folder)!r}: {error}", stacklevel=2
            )
