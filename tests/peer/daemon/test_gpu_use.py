"""What a reading of a GPU's use means, and what NVML's samples are read as."""

import sys
import types

import pytest

from atoll.peer.daemon import gpu_use
from atoll.peer.daemon.gpu_use import (
    BLIND_S,
    BUSY_S,
    FREE_S,
    GpuCourtesy,
    GpuReading,
    GpuRule,
    NvmlMeter,
    shares,
)
from atoll.peer.errors import DeviceError

STEP_S = 5.0


class Course:
    """A rule that is shown one reading after the other."""

    def __init__(self):
        self.at_s, self.told = 0.0, []
        self.rule = GpuRule(self, self.told.append)

    def read(self):
        return GpuReading(at_s=self.at_s, own=self.own, others=self.others)

    def show(self, others, seconds, *, own=0.8, trains=True):
        """Show the same for some time; return after how many seconds its word changed last."""
        self.own, self.others = own if trains else 0.0, others
        before, changed_s = None, None
        for step in range(1, round(seconds / STEP_S) + 1):
            self.at_s += STEP_S
            why = self.rule.why_not(is_training=trains)
            if before is not None and why != before:
                changed_s = step * STEP_S
            before = why
        self.why = before
        return changed_s


def test_a_program_that_stays_has_the_gpu():
    course = Course()
    course.show(0.0, 60)
    assert course.why == ""
    assert course.show(0.6, 60) == BUSY_S
    assert course.why == gpu_use.WHY
    assert course.show(0.0, 300, trains=False) == FREE_S
    assert course.why == ""
    assert course.told == []


def test_a_desktop_is_no_program_that_uses_the_gpu():
    course = Course()
    course.show(0.1, 600)
    assert course.why == ""


def test_a_short_use_is_no_reason_to_leave():
    course = Course()
    for _ in range(10):
        course.show(0.9, BUSY_S - STEP_S)
        course.show(0.0, BUSY_S - STEP_S)
    assert course.why == ""


def test_a_program_that_pauses_keeps_the_gpu():
    course = Course()
    course.show(0.9, 60)
    for _ in range(5):
        course.show(0.0, FREE_S - STEP_S, trains=False)
        course.show(0.3, STEP_S, trains=False)
    assert course.why == gpu_use.WHY


def test_a_machine_that_slept_was_not_used_meanwhile():
    course = Course()
    course.show(0.0, 60)
    course.at_s += 3600.0
    course.show(0.9, STEP_S)
    assert course.why == ""


def test_a_use_that_wavers_counts():
    course = Course()
    for _ in range(8):
        course.show(0.5, STEP_S)
        course.show(0.15, STEP_S)
    assert course.why == gpu_use.WHY


def test_a_peer_does_not_begin_beside_another_program():
    course = Course()
    course.show(0.5, STEP_S, trains=False)
    assert course.why == gpu_use.WHY


def test_a_peer_that_cannot_see_itself_takes_its_own_use_for_nobodys():
    course = Course()
    course.show(0.9, BLIND_S + 10 * STEP_S, own=0.0)
    assert course.why == ""
    assert len(course.told) == 1
    assert "as in a container" in course.told[0]
    course.show(0.9, STEP_S, own=0.0, trains=False)
    assert course.why == gpu_use.WHY


def test_a_meter_that_fails_stops_nobody():
    course = Course()
    course.show(0.9, 60)

    def fail():
        raise DeviceError("the driver is gone")

    course.rule.meter = types.SimpleNamespace(read=fail)
    assert [course.rule.why_not(is_training=False) for _ in range(3)] == [""] * 3
    assert course.told == ["--yield-gpu has no effect: the driver is gone"]


def test_shares_of_a_gpu():
    assert shares([], frozenset({1})) == (0.0, 0.0)
    assert shares([(1, 40), (2, 30), (3, 20)], frozenset({1})) == (0.4, 0.5)
    assert shares([(1, 40), (1, 30), (2, 5_000)], frozenset({1})) == (0.4, 1.0)  # odd drivers


class Sample(types.SimpleNamespace):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A library with two GPUs, on which the test puts samples."""

    class NVMLError(Exception):
        pass

    class NotFound(NVMLError):
        pass

    library = types.ModuleType("pynvml")
    library.NVMLError, library.NVMLError_NotFound = NVMLError, NotFound
    library.nvmlInit = lambda: None
    library.samples = {"GPU-a": [], "GPU-b": []}
    library.error = None

    def handle(uuid):
        if uuid not in library.samples:
            raise NotFound("Not Found")
        return uuid

    def utilization(gpu, since_us):
        if library.error:
            raise library.error
        found = [s for s in library.samples[gpu] if s.timeStamp > since_us]
        if not found:
            raise NotFound("Not Found")
        return found

    library.nvmlDeviceGetHandleByUUID = handle
    library.nvmlDeviceGetProcessUtilization = utilization
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpu_use, "_own_processes", lambda: frozenset({1}))
    return library


def test_a_meter_reads_what_is_new_on_the_gpu_that_others_use_most(nvml):
    meter = NvmlMeter(["GPU-a", "GPU-b"])
    nvml.samples["GPU-a"] = [Sample(pid=1, timeStamp=10, smUtil=90)]
    nvml.samples["GPU-b"] = [
        Sample(pid=1, timeStamp=10, smUtil=50),
        Sample(pid=7, timeStamp=11, smUtil=40),
    ]
    reading = meter.read()
    assert (reading.own, reading.others) == (0.5, 0.4)
    reading = meter.read()
    assert (reading.own, reading.others) == (0.0, 0.0)


def test_a_gpu_that_does_not_tell_is_refused_at_the_start(nvml):
    with pytest.raises(DeviceError, match="leave out --yield-gpu"):
        NvmlMeter(["GPU-c"])
    nvml.error = nvml.NVMLError("Not Supported")
    with pytest.raises(DeviceError, match="does not tell its use by process"):
        NvmlMeter(["GPU-a"])


def test_a_peer_knows_its_own_processes():
    assert gpu_use.os.getpid() in gpu_use._own_processes()
    assert (
        GpuCourtesy().after(GpuReading(at_s=0.0, own=0.5, others=0.0), is_training=True).knows_own
    )
