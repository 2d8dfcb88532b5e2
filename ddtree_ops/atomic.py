"""Files that a user names, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["write_text"]


def write_text(path: Path, text: str, *, mode: int = 0o644, make_folder: bool = True) -> None:
    """Write by rename, UTF-8: what was there before stays where this fails.

    The file that a link leads to is replaced, not the link; a device or a pipe (``/dev/stdout``) is written into as it is.

    :param mode: of the file.
    :param make_folder: False: a folder that is not there is an error.
    :raises OSError: the folder cannot be made, or nothing be written there.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        return
    place = path.resolve()
    if make_folder:
        place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        Path(name).chmod(mode)
        Path(name).replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
        raise
