"""The device that `scripts/gpu` measures: its name, its clock, its peak, and how busy it is.

A dry run puts the fake device of the tests in a GPU's place: it runs on the CPU, and refuses
float64, copies that nobody asked for, and operations across devices.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import torch

from atoll.peer.training.devices import Device

ROOT = Path(__file__).resolve().parent.parent
DRY = "dry run"
SAMPLE_S = 0.25  # NVML's own figure is over 1/6 to 1 s
SMI_S = 10.0  # a driver that answers later is not sampled

# Teraflops of dense 16-bit products that are added in float32. Names as `torch.cuda` gives them,
# without the maker's.
PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"B200", 2250, "NVIDIA DGX B200 datasheet: 72 PFLOPS of FP8, 8 GPUs, half of half"),
    (r"H200", 989, "NVIDIA H200 datasheet: 1,979 with sparsity, SXM"),
    (r"H200 NVL", 836, "NVIDIA H200 datasheet: 1,671 with sparsity, NVL"),
    (r"H100( SXM.*| 80GB HBM3)", 989, "NVIDIA H100 datasheet: 1,979 with sparsity, SXM"),
    (r"H100 NVL", 836, "NVIDIA H100 datasheet: 1,671 with sparsity, NVL"),
    (r"H100 PCIe", 756, "NVIDIA H100 datasheet: 1,513 with sparsity, PCIe"),
    (r"A100.*", 312, "NVIDIA A100 datasheet"),
    (r"A10", 125, "NVIDIA A10 datasheet"),
    (r"L40S", 362, "NVIDIA L40S datasheet"),
    (r"L40", 181, "NVIDIA L40 datasheet"),
    (r"L4", 121, "NVIDIA L4 datasheet: 242 with sparsity"),
    (r"RTX 6000 Ada Generation", 364, "NVIDIA Ada architecture whitepaper"),
    (r"RTX A6000", 155, "NVIDIA GA102 architecture whitepaper"),
    (r"RTX 4090", 165.2, "NVIDIA Ada architecture whitepaper"),
    (r"RTX 3090 Ti", 80, "NVIDIA GA102 architecture whitepaper, scaled by cores and clock"),
    (r"RTX 3090", 71, "NVIDIA GA102 architecture whitepaper"),
    (r"V100-SXM.*", 125, "NVIDIA V100 datasheet, float16"),
    (r"V100-PCIE.*", 112, "NVIDIA V100 datasheet, float16"),
    (r"T4", 65, "NVIDIA T4 datasheet, float16"),
)


def peak_tflops(name: str, precision: str) -> float | None:
    """Return a GPU's peak for a precision; None if it is not in the table."""
    if precision == "float32":
        return None
    own = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name)
    return next((tflops for pattern, tflops, _ in PEAKS if re.fullmatch(pattern, own)), None)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device to measure."""

    device: Device
    name: str
    """of the GPU, under which results are kept"""
    is_dry: bool = False

    @property
    def choice(self) -> str:
        """The name by which `Device.choose` finds it in this process."""
        return "cuda"

    @property
    def for_processes(self) -> str:
        """The name by which other processes find it; there is no fake device in them."""
        return "cpu" if self.is_dry else "cuda"

    def synchronise(self) -> None:
        """Wait until the device has done all that it was given."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call, to the end of its last kernel."""
        self.synchronise()
        began_s = time.perf_counter()
        work()
        self.synchronise()
        return time.perf_counter() - began_s

    def fastest_s(self, work: Callable[[], object], repeats: int) -> float:
        """Return the seconds of the fastest of some calls; a first one warms up."""
        work()
        return min(self.seconds(work) for _ in range(repeats))

    def free_bytes(self) -> tuple[int, int]:
        """Return the free memory of the device, and of the host."""
        host = psutil.virtual_memory().available
        return (host if self.is_dry else torch.cuda.mem_get_info(self.device.device)[0]), host

    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors took since `forget`; None in a dry run."""
        return None if self.is_dry else torch.cuda.max_memory_allocated(self.device.device)

    def forget(self) -> None:
        """Give back what earlier steps used, and count the most memory anew."""
        self.device.release()
        if not self.is_dry:
            torch.cuda.reset_peak_memory_stats(self.device.device)


def gpu() -> Place:
    """Return this machine's GPU.

    Raises:
        DeviceError: there is none.
    """
    device = Device.choose("cuda")
    return Place(device=device, name=device.label)


@contextmanager
def dry_run() -> Iterator[Place]:
    """Let the fake device stand for `cuda` in this thread, for the time of the block."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.accelerator import Accelerator, fake_device

    choose, threads = Device.choose, torch.get_num_threads()

    def chosen(name: str = "auto", precision: str = "auto") -> Device:
        return fake_device() if name == "cuda" else choose(name, precision)

    try:
        torch.set_num_threads(1)  # tiny tensors: a second thread only spins
        with patch.object(Device, "choose", chosen), Accelerator():
            yield Place(device=fake_device(), name=DRY, is_dry=True)
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(ROOT / "tests"))


# --- how busy it is


class Activity:
    """Samples the percentage of time in which some kernel runs, in a thread."""

    def __init__(self, read: Callable[[], float], source: str) -> None:
        self._read, self.source = read, source
        self._samples: list[tuple[float, float]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="activity", daemon=True)

    def __enter__(self) -> "Activity":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(SMI_S)

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            self._samples.append((time.monotonic(), self._read() / 100))

    def mean(self, since_s: float = 0.0, until_s: float = float("inf")) -> float | None:
        """Return the mean share between two times of the monotonic clock; None of no sample."""
        found = [share for at_s, share in self._samples if since_s <= at_s <= until_s]
        return sum(found) / len(found) if found else None


def activity(place: Place) -> Activity | None:
    """Return a way to sample a device; None if there is none."""
    if place.is_dry:
        return Activity(psutil.cpu_percent, "the CPU's, in a dry run")
    try:
        torch.cuda.utilization(place.device.device)
    except (ImportError, RuntimeError):  # no nvidia-ml-py, or no NVML
        return _by_smi(place)
    return Activity(lambda: torch.cuda.utilization(place.device.device), "NVML")


def _by_smi(place: Place) -> Activity | None:
    if shutil.which("nvidia-smi") is None:
        return None
    # By its UUID: `nvidia-smi` does not heed CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(place.device.device).uuid
    words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def read() -> float:
        answer = subprocess.run(
            [*words, "-i", f"GPU-{uuid}"], capture_output=True, text=True, timeout=SMI_S, check=True
        )
        return float(answer.stdout)

    try:
        read()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Activity(read, "nvidia-smi")


def event_share(place: Place, work: Callable[[], object], repeats: int) -> float:
    """Return the share of time between first and last kernel of each call: an upper bound."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]

    def all_of_them() -> None:
        for begin, end in pairs:
            begin.record()
            work()
            end.record()

    wall_s = place.seconds(all_of_them)
    return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3 / wall_s
