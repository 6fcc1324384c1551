"""What a process takes, as if it were alone on its machine."""

import mmap
import os
import tempfile

import pytest
import sizes_memory

BYTES = 8 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc")
def test_pages_of_files_are_told_from_shared_memory(tmp_path, monkeypatch):
    # The tests' folder may lie in memory.
    monkeypatch.setattr(sizes_memory, "is_memory", lambda path: path.startswith("/memfd:"))
    before = sizes_memory.memory(os.getpid(), "smaps_rollup")
    descriptor = os.memfd_create("test")
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        for each in (descriptor, file.fileno()):
            os.ftruncate(each, BYTES)
        with mmap.mmap(descriptor, BYTES) as shared, mmap.mmap(file.fileno(), BYTES) as on_disk:
            shared[:] = on_disk[:] = bytes(b"x" * BYTES)
            mapped = sizes_memory.mapped_files(os.getpid())
            assert [size for path, size in mapped.items() if str(tmp_path) in path] == [BYTES]
            assert not any("memfd" in path for path in mapped)
            now = sizes_memory.memory(os.getpid(), "smaps_rollup")
    os.close(descriptor)
    # Not all of what is no file: garbage of other tests may go meanwhile.
    assert now["Pss_Shmem"] - before["Pss_Shmem"] >= BYTES // 2


def test_a_process_that_has_ended_has_none():
    assert sizes_memory.memory(2**22 + 1, "status") == {}
    assert sizes_memory.mapped_files(2**22 + 1) == {}
