"""Where the vectors of a peer's state lie."""

import types

import pytest

from atoll.optim.state import mapped, vectors
from atoll.peer.daemon.beside.segments import segment_of
from atoll.peer.daemon.log_run import LogRun


def allocate(folder, *, state_on_disk):
    options = types.SimpleNamespace(state_on_disk=state_on_disk)
    run = types.SimpleNamespace(_env=types.SimpleNamespace(options=options))
    return LogRun._allocate(run, folder)


def test_a_state_in_memory_lies_where_long_vectors_do(tmp_path):
    assert allocate(tmp_path, state_on_disk=False) is vectors.empty


def test_a_state_on_a_disk_lies_in_files_that_the_trainer_maps_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there
    params_N = allocate(tmp_path / "log", state_on_disk=True)(1000).fill_(1.0)
    segment = segment_of(params_N)
    assert segment is not None and segment.descriptor is not None and len(segment) == 4000


def test_a_state_on_a_disk_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "file_system_of", lambda folder: "tmpfs")
    with pytest.raises(mapped.NotOnDisk):
        allocate(tmp_path, state_on_disk=True)
