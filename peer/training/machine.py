"""Memory of this machine, or of the container that holds this process.

A container shows the whole machine's memory, and the kernel kills what takes more than the
container's share. The shares are in the files of control groups, version 1 or 2 (Linux).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

PROC = Path("/proc/self/cgroup")
CONTROLLERS = Path("/sys/fs/cgroup")
# The folder, and the files of the limit and of what is used; in memory.stat, the part of that which
# the kernel would give up: copies of files that nobody has read for a while.
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


def memory_total() -> int:
    """Return the bytes that all programs here may take: the machine's, or the container's."""
    return int(min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())]))


def memory_free() -> int:
    """Return the bytes that programs here may still take."""
    left = [max(0, limit - used) for limit, used in _limits()]
    return int(min([psutil.virtual_memory().available, *left]))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group with a limit that this process is in."""
    with suppress(OSError, ValueError):
        for line in PROC.read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number == "0":
                yield from _of_group(V2, group)
            elif "memory" in controllers.split(","):
                yield from _of_group(V1, group)


def _of_group(version: tuple[str, str, str, str], group: str) -> Iterator[tuple[int, int]]:
    folder, limit, used, cached = version
    # A limit of a parent holds as well. Within a container the path may be the host's, and the
    # container's own group is mounted as the root.
    path = PurePosixPath(group.lstrip("/"))
    for part in (path, *path.parents):
        place = CONTROLLERS / folder / part
        with suppress(OSError, ValueError):  # the root has no limit; "max" is none
            limit_bytes = int((place / limit).read_text())
            yield limit_bytes, _used(place, used, cached)


def _used(place: Path, used: str, cached: str) -> int:
    """Return the bytes in use that the kernel would not give up; 0 if that cannot be read."""
    with suppress(OSError, ValueError):
        used_bytes = int((place / used).read_text())
        stat = dict(line.split(" ", 1) for line in (place / "memory.stat").read_text().splitlines())
        return used_bytes - int(stat.get(cached, 0))
    return 0
