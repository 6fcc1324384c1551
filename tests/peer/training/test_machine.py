"""Memory of a container: the files of control groups, as a kernel shows them."""

from types import SimpleNamespace

import psutil
import pytest

from atoll.peer.training import machine
from atoll.peer.training.machine import memory_free, memory_total

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
UNLIMITED = 9223372036854771712  # of version 1: the most whole pages that a long counts


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """Return the file of this process's groups, on a machine with 64 kB of which 50 are free."""
    memory = SimpleNamespace(total=64_000, available=50_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "PROC", tmp_path / "own")
    monkeypatch.setattr(machine, "CONTROLLERS", tmp_path)
    return tmp_path / "own"


def put(folder, version, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(version, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{version[-1]} {cached}\nshmem 2\n")


def test_without_control_groups_all_of_the_machine_is_there(own):
    assert (memory_total(), memory_free()) == (64_000, 50_000)
    own.write_text("0::/\n")  # the root has no files
    assert (memory_total(), memory_free()) == (64_000, 50_000)


def test_the_tightest_group_on_the_way_to_the_root_counts(own, tmp_path):
    own.write_text("0::/pods/one\n")
    put(tmp_path / "pods" / "one", V2, "max", 9_000)
    put(tmp_path / "pods", V2, 20_000, 15_000)
    put(tmp_path, V2, 40_000, 39_000)
    assert (memory_total(), memory_free()) == (20_000, 1_000)


def test_what_the_kernel_would_give_up_is_free(own, tmp_path):
    own.write_text("0::/one\n")
    put(tmp_path / "one", V2, 20_000, 15_000, cached=4_000)
    assert memory_free() == 9_000


def test_a_limit_holds_although_its_use_cannot_be_read(own, tmp_path):
    own.write_text("0::/one\n")
    put(tmp_path / "one", V2, 20_000, 15_000)
    (tmp_path / "one" / "memory.stat").unlink()
    assert (memory_total(), memory_free()) == (20_000, 20_000)


def test_a_container_may_know_its_group_by_the_name_outside_alone(own, tmp_path):
    own.write_text("5:cpu:/there\n4:memory:/docker/1234\n0::/\n")
    put(tmp_path / "memory", V1, 30_000, 31_000)  # mounted as the root; use may pass the limit
    assert (memory_total(), memory_free()) == (30_000, 0)


@pytest.mark.parametrize("text", ["", "rubbish\n", "4:memory:/a\n"])
def test_groups_that_cannot_be_read_limit_nothing(own, tmp_path, text):
    own.write_text(text)
    put(tmp_path / "memory", V1, UNLIMITED, 5_000)
    assert (memory_total(), memory_free()) == (64_000, 50_000)
