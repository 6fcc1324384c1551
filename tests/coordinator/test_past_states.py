"""The state after any round that a coordinator's log has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atoll.coordinator.past_states import NoPastState, run_folder, spans, state_after
from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LogStore
from atoll.peer.cli.main import main
from support.copies import ROUNDS, Run, opened, past, run_template
from support.kit import REPLAY, genesis

__all__ = ["past", "run_template"]


def test_each_round_has_the_bits_that_it_had(past: Run) -> None:
    with opened(past.state_dir) as log:
        log.store.drop_snapshots([2])
        state = genesis()
        for round_number in range(ROUNDS + 1):
            found = state_after(past.state_dir, round_number)  # while the log is in use
            assert found.state.root() == state.root()
            assert found.position == round_number
            record = log.store.get(round_number)
            if record is not None:
                entry = Entry.decode(record.entry)
                assert found.chain == entry.previous_chain
                state = REPLAY.next_state(state, entry, log.store.body(round_number))
        assert found.chain == log.store.head.chain
        assert found.run_id == log.files.run_id


def test_the_rounds_that_a_log_has_are_told(past: Run) -> None:
    with opened(past.state_dir) as log:
        log.store.drop_bodies([0, 2])
        assert spans(log.store) == [(0, 0), (2, 2), (4, 5)]
    for missing in (1, 3, 6, -1):
        with pytest.raises(NoPastState, match=f"got {missing}; it has .* rounds 0, 2, 4 to 5"):
            state_after(past.state_dir, missing)
    assert state_after(past.state_dir, 2).position == 2


def test_a_state_without_its_certified_root_is_refused(
    past: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: object, state: object, entry: Entry, body: object) -> object:
        return genesis().at(entry.position + 1)

    with opened(past.state_dir) as log:
        log.store.drop_snapshots([2])
    monkeypatch.setattr("atoll.coordinator.past_states.Replay.next_state", wrong)
    with pytest.raises(NoPastState, match="round 2: expected the state root"):
        state_after(past.state_dir, 3)


def test_a_damaged_update_is_refused(past: Run) -> None:
    with opened(past.state_dir) as log:
        log.store._db.execute("UPDATE bodies SET data = zeroblob(length(data)) WHERE position = 4")
        log.store._db.commit()
    with pytest.raises(NoPastState, match="export another round"):
        state_after(past.state_dir, 5)


def test_reading_a_log_changes_nothing_in_it(past: Run) -> None:
    leftover = past.state_dir / "log" / "snapshot-000000000006.0.new"
    leftover.write_bytes(b"being written by the coordinator")
    store = LogStore.reading(past.state_dir / "log")
    store.close()
    assert leftover.exists()


def test_the_directory_is_found_from_its_checkpoints(past: Run, tmp_path: Path) -> None:
    checkpoint = next((past.state_dir / "checkpoints").glob("*.safetensors"))
    for path in (past.state_dir, past.state_dir / "checkpoints", checkpoint):
        assert run_folder(path) == past.state_dir
    shutil.copy(checkpoint, tmp_path / "alone.safetensors")
    with pytest.raises(NoPastState, match="expected the state directory of a coordinator"):
        run_folder(tmp_path / "alone.safetensors")


def test_a_round_is_exported_as_one_file(
    past: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "model.safetensors"
    command = ["export", str(past.state_dir), "--format", "safetensors", "--out", str(out)]
    assert main([*command, "--round", "3"]) == 2
    assert "create it first" in capsys.readouterr().err
    out.parent.mkdir()
    assert main([*command, "--round", "9"]) == 2
    assert "rounds 0 to 5" in capsys.readouterr().err
    assert main([*command, "--round", "3"]) == 0
    assert capsys.readouterr().err == f"{out}: model after round 3\n"
    expected = state_after(past.state_dir, 3)
    assert all((load_file(out)[name] == value).all() for name, value in expected.params.items())
    assert [path.name for path in out.parent.iterdir()] == [out.name]
