"""A run as its coordinator's directory records it."""

from contextlib import closing

import pytest

from atoll.coordinator import recorded
from atoll.coordinator.history import History
from support.organiser import end_a_run, tiny_spec
from support.status import make_events, make_peer


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    """The directory of a coordinator that has ended, with rounds that it learned of."""
    path = tmp_path_factory.mktemp("ended") / "state"
    end_a_run(path, tiny_spec(), rounds=600)
    with closing(History(path / "history.db")) as history:
        for event in make_events(26, 3):
            history.add_event(event)
        history.put_peers([make_peer(i, position=600) for i in range(3)])
    return path


def contents(path):
    return {p.name: p.read_bytes() for p in path.rglob("*") if p.suffix in (".db", ".sqlite")}


def test_all_rounds_are_read_and_the_status_holds_the_newest(state_dir):
    before = contents(state_dir)
    record = recorded.read(state_dir)
    assert [row.position for row in record.rounds] == list(range(1, 601))
    status = record.status
    assert [row.position for row in status.history] == list(range(89, 601))
    assert (status.run_name, status.loss, status.valid_loss) == (
        "tiny",
        record.rounds[-1].loss,
        record.rounds[-1].valid_loss,
    )
    assert {peer.state for peer in status.peers} == {"gone"}
    assert status.now == record.rounds[-1].at
    assert status.params > 0
    assert contents(state_dir) == before


def test_tokens_count_the_rounds_that_were_not_read(state_dir):
    assert recorded.read(state_dir, newest=5).status.tokens_total == 600 * 3 * 61_440


def test_a_recording_shows_the_run_after_any_round(state_dir):
    before = contents(state_dir)
    with closing(recorded.Recording(state_dir)) as recording:
        early = recording.at(3)
        assert [row.position for row in early.history] == [1, 2, 3]
        assert (early.tokens_total, early.now) == (3 * 3 * 61_440, early.history[-1].at)
        assert early.loss == early.history[-1].loss
        assert all(event.at <= early.now for event in early.events)
        assert early.state == "training"
        none = recording.at(0)
        assert (none.state, none.history, none.peers, none.loss) == ("waiting", [], [], None)
        assert recording.at(9999).history == recording.now.history
    assert contents(state_dir) == before


def test_a_run_by_gossip_is_as_far_as_its_peers_reported(tmp_path):
    spec = tiny_spec(outer={"method": "noloco"}, run={"rounds": 4})
    end_a_run(tmp_path / "state", spec, rounds=4)
    status = recorded.read(tmp_path / "state").status
    assert (status.position, status.state) == (4, "finished")


def test_a_folder_that_is_no_coordinators_is_refused(tmp_path):
    with pytest.raises(recorded.NoRecord, match="state directory of a coordinator"):
        recorded.read(tmp_path)


def test_a_module_that_the_run_lacks_is_refused(state_dir):
    with pytest.raises(recorded.NoRecord, match="stage-7"):
        recorded.read(state_dir, module="stage-7")


def test_a_damaged_history_is_named_and_left_as_it_is(state_dir, tmp_path):
    for name in ("keys.json", "spec.json"):
        (tmp_path / name).write_bytes((state_dir / name).read_bytes())
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.sqlite").write_bytes((state_dir / "log/log.sqlite").read_bytes())
    (tmp_path / "history.db").write_bytes(b"no database" * 100)
    with pytest.raises(recorded.NoRecord, match="cannot be read"):
        recorded.read(tmp_path)
    assert (tmp_path / "history.db").read_bytes() == b"no database" * 100
