"""Leaving a GPU to other programs: what a reading of its use means, and the reading by NVML.

    GpuReading     the use of a GPU by this peer and by others
    GpuCourtesy    what follows from one reading after the other; pure
    NvmlMeter      takes readings of NVIDIA's GPUs           [package: nvidia-ml-py]
    GpuRule        the `Rule` of a shift

NVML names processes by their numbers outside of containers, so inside of one a peer cannot tell its
own use from that of others. It then never leaves a shift for others, but begins none beside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psutil

from atoll.coordinator.run.notice import Notice
from atoll.peer import notices
from atoll.peer.errors import DeviceError
from atoll.peer.extras import extra

BUSY = 0.2  # of the GPU's time: a desktop that is drawn takes a few percent
FREE = 0.1
BUSY_S = 20.0  # a thumbnail or a web page's animation is no reason to leave a run
FREE_S = 120.0  # a game between two levels will be back; joining again costs what was missed
MAX_STEP_S = 10.0  # a longer one is of a machine that slept
BLIND_S = 60.0  # of training in which others were seen and this peer was not
WHY = "another program uses the GPU"


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """The use of a GPU since the reading before; of several, of the one that others use most."""

    at_s: float
    own: float
    """Fraction of the GPU's time, 0 to 1, of this peer's processes."""
    others: float
    """The same of all other processes."""


@dataclass(frozen=True, kw_only=True)
class GpuCourtesy:
    """What readings so far say."""

    is_yielding: bool = False
    """whether the GPU is left to others"""
    at_s: float | None = None
    """when the reading before was taken"""
    busy_s: float = 0.0
    """how long others have used it, less the time, or half of it, in which they have not"""
    free_s: float = 0.0
    """how long nobody has used it, while it is left to others"""
    knows_own: bool = False
    """whether this peer was seen among the processes"""
    blind_since_s: float | None = None
    """since when others were seen in training, and this peer was not"""
    is_blind: bool = False
    """whether this peer cannot be told from others"""

    def after(self, reading: GpuReading, *, is_training: bool) -> GpuCourtesy:
        """Return what holds after one more reading.

        Args:
            reading: newer than all before.
            is_training: whether this peer may have used the GPU in it.
        """
        seen = replace(self._attributed(reading, is_training=is_training), at_s=reading.at_s)
        others = reading.others if seen.knows_own or not is_training else 0.0
        passed_s = 0.0 if self.at_s is None else reading.at_s - self.at_s
        if self.is_yielding:
            free_s = self.free_s + passed_s if others <= FREE else 0.0
            return replace(seen, free_s=free_s, busy_s=0.0, is_yielding=free_s < FREE_S)
        # What lasts is noticed although it wavers; what comes and goes is forgotten.
        passed_s = min(passed_s, MAX_STEP_S)
        change_s = passed_s if others >= BUSY else -passed_s if others <= FREE else -passed_s / 2
        busy_s = max(0.0, self.busy_s + change_s)
        # Before a shift nothing is lost by leaving the GPU to others at once.
        is_taken = busy_s >= BUSY_S if is_training else others >= BUSY
        return replace(seen, busy_s=busy_s, free_s=0.0, is_yielding=is_taken)

    def _attributed(self, reading: GpuReading, *, is_training: bool) -> GpuCourtesy:
        if self.knows_own or reading.own > 0:
            return replace(self, knows_own=True, blind_since_s=None, is_blind=False)
        if not is_training or reading.others < BUSY:
            return replace(self, blind_since_s=None)
        since_s = reading.at_s if self.blind_since_s is None else self.blind_since_s
        is_blind = self.is_blind or reading.at_s - since_s >= BLIND_S
        return replace(self, blind_since_s=since_s, is_blind=is_blind)


class GpuMeter(Protocol):
    """Takes readings."""

    def read(self) -> GpuReading:
        """Return the use since the last call. Raises DeviceError."""
        ...


@dataclass
class GpuRule:
    """Trains while no other program uses the GPU."""

    meter: GpuMeter
    tell: Callable[[Notice], None]
    """Takes what the owner should know, once each."""
    courtesy: GpuCourtesy = GpuCourtesy()
    has_failed: bool = False

    def why_not(self, *, is_training: bool) -> str:
        """Return why the GPU is left to others; empty if it is free."""
        try:
            reading = self.meter.read()
        except DeviceError as error:
            if not self.has_failed:
                self.tell(notices.option_unused(option="--yield-gpu", reason=str(error)))
            self.has_failed, self.courtesy = True, GpuCourtesy()
            return ""
        before, self.courtesy = self.courtesy, self.courtesy.after(reading, is_training=is_training)
        if self.courtesy.is_blind and not before.is_blind:
            self.tell(notices.gpu_blind())
        return WHY if self.courtesy.is_yielding else ""


class NvmlMeter:
    """Readings of NVIDIA's GPUs."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Find GPUs by their UUIDs, as 'GPU-...'.

        Raises:
            ExtraMissing: the package nvidia-ml-py is not installed.
            DeviceError: a GPU is not there, or does not tell its use by process.
        """
        self._nvml: Any = extra("pynvml", "--yield-gpu")
        try:
            self._nvml.nvmlInit()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except self._nvml.NVMLError as error:
            raise DeviceError(
                f"NVML does not find the GPU: {error}; leave out --yield-gpu"
            ) from None
        self._read_at_us = [0] * len(self._gpus)
        self.read()

    def read(self) -> GpuReading:
        """Return the use since the last call, of the GPU that others use most."""
        own = _own_processes()
        uses = [self._use(index, own) for index in range(len(self._gpus))]
        mine, others = max(uses, key=lambda use: use[1])
        return GpuReading(at_s=time.monotonic(), own=mine, others=others)

    def _use(self, index: int, own: frozenset[int]) -> tuple[float, float]:
        since_us = self._read_at_us[index]
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._gpus[index], since_us)
        except self._nvml.NVMLError_NotFound:  # nobody has used it
            return 0.0, 0.0
        except self._nvml.NVMLError as error:
            raise DeviceError(f"the GPU does not tell its use by process ({error})") from None
        used = [(s.pid, s.timeStamp, s.smUtil) for s in samples if s.timeStamp > since_us]
        self._read_at_us[index] = max([since_us, *(at_us for _, at_us, _ in used)])
        return shares(((pid, percent) for pid, _, percent in used), own)


def shares(used: Iterable[tuple[int, int]], own: frozenset[int]) -> tuple[float, float]:
    """Return the fractions of a GPU's time by this peer and by others.

    Args:
        used: process ids, and percent of the time. Drivers give a process several times at times.
        own: this peer's processes.
    """
    most: dict[int, int] = {}
    for pid, percent in used:
        most[pid] = max(most.get(pid, 0), min(max(percent, 0), 100))
    mine = sum(percent for pid, percent in most.items() if pid in own)
    return min(mine, 100) / 100, min(sum(most.values()) - mine, 100) / 100


def _own_processes() -> frozenset[int]:
    children = []
    with suppress(psutil.Error):
        children = [child.pid for child in psutil.Process().children(recursive=True)]
    return frozenset((os.getpid(), *children))
