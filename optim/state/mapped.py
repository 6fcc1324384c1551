"""Long vectors in files, mapped into memory, for an outer state that shall not stay in memory.

The system writes their pages out and drops them when it needs the memory, and reads them again when
they are used; until then they count as memory of the process that maps files (`RssFile`).

A file has no name, so none is left behind when the process ends, however it ends: a state that was
being written is never read again, and a replica resumes from a snapshot, whose leaves have digests,
and the entries after it. Its blocks are taken before it is mapped, because on a full disk the first
write to a page without one would end the process.

    NotOnDisk (ValueError)   a folder whose files lie in memory
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IN_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mountinfo")
ZEROS = bytes(1 << 20)


class NotOnDisk(ValueError):
    """The files of a folder lie in memory."""


class MappedVectors:
    """Makes vectors that lie in files of a folder."""

    def __init__(self, folder: Path, map_file: Callable[[int, int], mmap.mmap] = mmap.mmap) -> None:
        """Use a folder, which is made if it is absent.

        Args:
            folder: on a disk.
            map_file: maps a file, given its descriptor and its bytes. One that keeps the file open
                lets another process map it too.

        Raises:
            NotOnDisk: its files would lie in memory.
            OSError: it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        expect_disk(folder)
        self._folder = folder
        self._map_file = map_file

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised vector, fp32 or bf16; its file goes with the last view of it.

        Raises:
            OSError: the disk is full.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        num_bytes = numel * dtype.itemsize
        with tempfile.TemporaryFile(prefix="state-", dir=self._folder) as file:
            take_blocks(file.fileno(), num_bytes)
            memory = self._map_file(file.fileno(), num_bytes)
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype)


def expect_disk(folder: Path) -> None:
    """Refuse a folder that lies in memory, or would if it were made.

    Raises:
        NotOnDisk: it does.
    """
    kind = _kind_of(folder)
    if kind in IN_MEMORY:
        raise NotOnDisk(
            f"{folder} lies in memory ({kind}), so an outer state there would save none; choose a "
            "folder on a disk with --state-dir, or omit --outer-state disk"
        )


def is_on_disk(folder: Path) -> bool:
    """Return whether a folder lies on a disk, or would if it were made."""
    return _kind_of(folder) not in IN_MEMORY


def _kind_of(folder: Path) -> str:
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return file_system_of(nearest)


def take_blocks(descriptor: int, num_bytes: int) -> None:
    """Let a file have so many bytes, with blocks on the disk for all of them.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    for start in range(0, num_bytes, len(ZEROS)):  # macOS
        os.pwrite(descriptor, ZEROS[: num_bytes - start], start)


def file_system_of(folder: Path) -> str:
    """Return the kind of file system that a folder lies on, as Linux names it; else nothing."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    mounts = [line.split(" - ") for line in lines if line.split()[2] == number]
    return mounts[-1][1].split()[0] if mounts else ""
