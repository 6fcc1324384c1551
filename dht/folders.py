"""Temporary folders that outlive no owner for long, however it ended.

A folder has a file that its owner keeps locked. The system unlocks it with the owner's death, so
the next one that makes or gives up a folder of the same prefix removes what a SIGKILL has left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

LEFT_AFTER_S = 60.0  # a younger folder may not have its lock yet


def claim_folder(prefix: str, parent: Path | None = None) -> tuple[Path, IO[bytes]]:
    """Make a private folder, and remove those of this prefix whose owners are dead.

    Args:
        prefix: of the folder's name.
        parent: the system's folder of temporary files by default.

    Returns:
        The folder, and a file whose lock shows that its owner lives: keep it open.

    Raises:
        OSError: it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_left(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = (folder / "lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def give_up_folder(folder: Path, lock: IO[bytes], prefix: str) -> None:
    """Remove a folder that was claimed, and those of this prefix beside it whose owners are dead.

    One that was killed while all others ran would else keep its folder until another one starts.
    """
    lock.close()
    shutil.rmtree(folder, ignore_errors=True)
    _remove_left(prefix, folder.parent)


def _remove_left(prefix: str, parent: Path) -> None:
    for old in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_if_left(old)


def _remove_if_left(folder: Path) -> None:
    about = folder.lstat()
    is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    if not is_ours or time.time() - about.st_mtime < LEFT_AFTER_S:
        return  # anybody may make a folder or a link of this name
    with (folder / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
