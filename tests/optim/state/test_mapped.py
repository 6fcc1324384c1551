import errno
import gc
import os

import pytest
import torch

from atoll.optim.state import mapped
from atoll.optim.state.mapped import MappedVectors, NotOnDisk


@pytest.fixture
def vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there
    return MappedVectors(tmp_path / "log")


def mapped_files(folder) -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if str(folder) in line]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_a_vector_lies_in_a_file_without_a_name_until_nobody_has_it(vectors, tmp_path):
    vector = vectors.empty(100_000).fill_(3.0)
    view = vector[5:7]
    assert len(mapped_files(tmp_path)) == 1
    assert list((tmp_path / "log").iterdir()) == []
    del vector
    assert view.tolist() == [3.0, 3.0]
    del view
    gc.collect()
    assert mapped_files(tmp_path) == []


def test_vectors_have_the_format_and_length_that_was_asked_for(vectors):
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (0, 1, 1_000_003):
            vector = vectors.empty(numel, dtype)
            assert (vector.dtype, vector.shape, vector.device.type) == (dtype, (numel,), "cpu")
            vector.fill_(2.0)
            assert float(vector.float().sum()) == 2.0 * numel


def test_a_full_disk_is_an_error_before_anything_is_mapped(vectors, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped, "take_blocks", full)
    with pytest.raises(OSError, match="No space"):
        vectors.empty(1_000)


@pytest.mark.parametrize("has_call", [True, False])
def test_a_file_has_blocks_for_all_of_its_bytes(tmp_path, has_call, monkeypatch):
    if not has_call:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "file").open("w+b") as file:
        mapped.take_blocks(file.fileno(), 3_000_001)
        found = os.fstat(file.fileno())
    assert found.st_size == 3_000_001
    assert 512 * found.st_blocks >= 3_000_001


def test_a_folder_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "file_system_of", lambda folder: "tmpfs")
    with pytest.raises(NotOnDisk, match=r"lies in memory \(tmpfs\).*--state-dir"):
        MappedVectors(tmp_path / "log")
    with pytest.raises(NotOnDisk):
        mapped.expect_disk(tmp_path / "not" / "made")


def test_the_file_system_is_that_of_the_mount(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(mapped, "MOUNTS", mounts)
    assert mapped.file_system_of(tmp_path) == ""  # outside Linux
    mounts.write_text(
        "21 1 0:99 / /other rw - proc proc rw\n"
        f"22 1 {number} / / rw,relatime shared:1 - ramfs none rw\n"
    )
    assert mapped.file_system_of(tmp_path) == "ramfs"
