"""Memory of a process with those that belong to it, as if they were alone on their machine.

Memory that they share counts once, and pages of files, libraries above all, count whole.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

FILES_S = 2.0  # libraries hardly change, and a look at all mappings takes 20 ms a process


@dataclass
class Process:
    """Peaks of a process with those that belong to it, alone on a machine, and of its p2pd.

    Memory that they share with each other counts once.
    """

    peak_bytes: int = 0
    anonymous_bytes: int = 0
    """The largest sample without pages of files, which the system takes back if it needs them."""
    file_bytes: int = 0
    """The largest sample of pages of files: libraries, and an outer state that is mapped."""
    p2pd_bytes: int = 0
    cpu_s: float = 0.0
    files_at_s: float = -math.inf
    """When pages of files were counted; that takes some time."""

    def sample(self, pid: int) -> None:
        """Read what the kernel knows of a live process."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            ours, cpu_s = [pid], 0.0
            for child in process.children(recursive=True):
                if "p2pd" in child.name():
                    peak = memory(child.pid, "status").get("VmHWM", 0)
                    self.p2pd_bytes = max(self.p2pd_bytes, peak)
                else:
                    ours.append(child.pid)
            for each in ours:
                times = psutil.Process(each).cpu_times()
                cpu_s += times.user + times.system
            self.cpu_s = max(self.cpu_s, cpu_s)
            if time.monotonic() > self.files_at_s + FILES_S:
                self.files_at_s = time.monotonic()
                self.file_bytes = max(self.file_bytes, file_bytes(ours))
            found = [memory(each, "smaps_rollup") for each in ours]
            anonymous = sum(each.get("Pss", 0) - each.get("Pss_File", 0) for each in found)
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
            self.peak_bytes = max(self.peak_bytes, anonymous + self.file_bytes)


def file_bytes(pids: Sequence[int]) -> int:
    """Return the bytes of files that some processes have in memory.

    Of each file those of the process that has the most: they mostly have the same pages.
    """
    most = dict[str, int]()
    for pid in pids:
        for path, size in mapped_files(pid).items():
            most[path] = max(size, most.get(path, 0))
    return sum(most.values())


def mapped_files(pid: int) -> dict[str, int]:
    """Return the bytes of each file that a process has in memory, by path."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return {}
    found, path = dict[str, int](), ""
    for line in lines:
        name, _, value = line.partition(":")
        if "-" in name:  # addresses, permissions, offset, device, inode, path
            fields = line.split(maxsplit=5)
            path = fields[5] if fields[4] != "0" and not is_memory(fields[5]) else ""
        elif path and name in ("Rss", "Anonymous"):
            size = 1024 * int(value.split()[0])
            found[path] = found.get(path, 0) + (size if name == "Rss" else -size)
    return found


def is_memory(path: str) -> bool:
    """Return whether a mapped file is memory that processes share."""
    return path.startswith(("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV"))


def memory(pid: int, table: str) -> dict[str, int]:
    """Return the sizes in a file of /proc/PID in bytes; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{table}").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: 1024 * int(value.split()[0]) for name, value in pairs}
