"""The state directory of a peer: whose it is, who uses it, and what is kept in it."""

import asyncio
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.coordinator.rpc.client_errors import (
    CoordinatorUnreachable,
    NotWelcome,
    WrongCertificate,
)
from atoll.coordinator.run.invite import MAX_BOOTSTRAP, Invite
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.membership import (
    Enrolment,
    Membership,
    StateDirectory,
    addresses_to_keep,
    expect_run,
)
from atoll.peer.daemon.state_directory import (
    StateDirectoryError,
    StateDirectoryInUse,
    StateDirectoryUnusable,
    StateOfAnotherRun,
)
from atoll.peer.paths import PeerPaths

RUN = b"\x01" * 32


@pytest.fixture
def paths(tmp_path):
    return PeerPaths(root=tmp_path / "state")


@pytest.fixture
def membership():
    return Membership(
        spec=RunSpec.from_dict({"run": {"name": "tiny"}}),
        layout=Layout.of(torch.nn.Linear(3, 2)),
        genesis_root=b"\x02" * 32,
        admission=b"\x00\xff",
        bootstrap=("/ip4/127.0.0.1/tcp/1/p2p/a",),
        evictions=b"signed",
        relocation=b"elsewhere",
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_joining_gave_is_there_at_the_next_start(paths, membership):
    directory = StateDirectory(paths, RUN)
    assert directory.recall() is None
    directory.remember(membership)
    directory.close()
    again = StateDirectory(paths, RUN)
    assert again.recall() == membership
    again.close()


def test_the_directory_of_a_coordinator_is_left_alone(paths):
    """Its log would have been the peer's too, which drops old updates."""
    paths.root.mkdir()
    RunKeys.load_or_create(paths.root / KEYS_FILE)
    before = contents(paths.root)
    with pytest.raises(StateDirectoryUnusable, match="that of a coordinator"):
        StateDirectory(paths, RUN)
    assert contents(paths.root) == before


def test_remembering_replaces_the_file_as_a_whole(paths, membership, monkeypatch):
    directory = StateDirectory(paths, RUN)
    directory.remember(membership)

    def power_cut(descriptor):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        directory.remember(membership)
    assert directory.recall() == membership
    directory.close()


def test_the_name_of_what_joining_gave_is_synced_too(paths, membership, monkeypatch):
    """Without it a peer that lost power knows the addresses in its invite alone: old ones."""
    directory, synced = StateDirectory(paths, RUN), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, is_there())))
    is_there = paths.run.exists
    directory.remember(membership)
    assert synced[-1] == (paths.root.stat().st_ino, True)
    directory.close()


def test_a_full_disk_costs_a_peer_no_eviction_that_it_hears_of(paths, membership, monkeypatch):
    told = []
    directory = StateDirectory(paths, RUN)
    enrolment = Enrolment(
        directory,
        None,
        membership,
        own_bootstrap=(),
        show=lambda level, text, key: told.append((level, text)),
    )

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        enrolment.keep_evictions(b"newer")
        assert enrolment.membership.evictions == b"newer"
        assert [level for level, _ in told] == ["warning"] and "make room" in told[0][1]
    enrolment.keep_evictions(b"newer")  # the next heartbeat, with room
    assert directory.recall().evictions == b"newer" and len(told) == 1
    directory.close()


def test_where_the_coordinator_is_is_kept_for_the_next_start(paths, membership):
    directory = StateDirectory(paths, RUN)
    assert directory.relocation() == b""
    own, other, new = ("/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/127.0.0.1/tcp/2/p2p/b", "/new/p2p/c")
    enrolment = Enrolment(
        directory,
        None,
        replace(membership, bootstrap=(own, other)),
        own_bootstrap=(own,),
        show=lambda level, text, key: None,
    )
    enrolment.keep_relocation(b"newer", (new,))
    assert directory.relocation() == b"newer"
    assert directory.recall().bootstrap == (new, other)  # the old node's is of no use
    assert enrolment.own_bootstrap == (new,)
    paths.run.write_bytes(b"rot")
    assert directory.relocation() == b""
    directory.close()


def test_a_record_of_an_older_version_says_nothing_of_another_place(paths, membership):
    directory = StateDirectory(paths, RUN)
    directory.remember(membership)
    fields = json.loads(paths.run.read_bytes())
    del fields["relocation"]
    paths.run.write_text(json.dumps(fields))
    assert directory.relocation() == b"" and directory.recall().evictions == b"signed"
    directory.close()


def test_a_start_takes_the_kept_place_before_it_joins(paths, membership):
    directory, recalled = StateDirectory(paths, RUN), []
    directory.remember(membership)

    class Client:
        module = ""

        def recall_relocation(self, record):
            recalled.append(record)

        async def join(self):
            assert recalled == [b"elsewhere"]
            raise NotWelcome(None, "enough")

    with pytest.raises(NotWelcome):
        asyncio.run(Enrolment.open(Client(), directory, None, lambda *event, key=None: None))
    directory.close()


OLD = Invite(
    addresses=("old:7700",),
    run_id=RUN,
    run_key=bytes(32),
    tls_sha256=bytes(32),
    bootstrap=("/ip4/127.0.0.1/tcp/1/p2p/b",),
)


class MovedCoordinator:
    """A client whose coordinator is elsewhere; nodes of the run may know where."""

    module = ""
    addresses = ("new:7700", "old:7700")

    def __init__(self, error):
        self.error, self.is_found, self.asked = error, False, []

    def recall_relocation(self, record):
        pass

    async def join(self):
        raise NotWelcome(None, "there") if self.is_found else self.error

    async def find(self, nodes):
        self.asked.append(tuple(nodes))
        self.is_found = len(self.asked) == 2
        return self.is_found

    async def follow(self):
        assert self.is_found


def test_a_coordinator_that_does_not_answer_is_looked_for(paths, membership, monkeypatch):
    """By a newcomer at the nodes of its invite, by a peer that was away at those that it kept."""
    monkeypatch.setattr("atoll.peer.daemon.membership.PAUSE_S", (0.0, 0.0))
    directory, said = StateDirectory(paths, RUN), []
    directory.remember(membership)
    client = MovedCoordinator(CoordinatorUnreachable("old:7700: nobody is there"))
    opening = Enrolment.open(
        client, directory, OLD, lambda level, text, key=None: said.append(text), client.find
    )
    with pytest.raises(NotWelcome, match="there"):
        asyncio.run(opening)
    assert client.asked == [(*OLD.bootstrap, *membership.bootstrap)] * 2
    assert said[-1].endswith("nodes of the run say that it is at new:7700 and old:7700")
    directory.close()


def test_another_server_at_an_old_address_is_reported(paths):
    directory = StateDirectory(paths, RUN)
    client = MovedCoordinator(WrongCertificate("old:7700: another server"))
    with pytest.raises(WrongCertificate):
        asyncio.run(
            Enrolment.open(client, directory, OLD, lambda *event, key=None: None, client.find)
        )
    assert client.asked == [OLD.bootstrap]
    directory.close()


def test_one_peer_at_a_time(paths):
    first = StateDirectory(paths, RUN)
    with pytest.raises(StateDirectoryInUse, match="--state-dir"):
        StateDirectory(paths, RUN)
    first.close()
    StateDirectory(paths, RUN).close()


def test_the_state_of_another_run_is_left_as_it_was(paths, membership):
    directory = StateDirectory(paths, RUN)
    directory.remember(membership)
    directory.close()
    paths.lock.unlink()
    before = contents(paths.root)
    with pytest.raises(
        StateOfAnotherRun, match=r"expected the state of run 0909.* got that of run 0101"
    ):
        StateDirectory(paths, b"\x09" * 32)
    assert contents(paths.root) == before


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[1]", b"7", b'{"run": 1}', b"{"])
def test_a_description_that_is_none_is_left_as_it_was(paths, garbage):
    paths.root.mkdir()
    paths.run.write_bytes(garbage)
    with pytest.raises(StateOfAnotherRun, match=r"run\.json: expected the description of a run"):
        StateDirectory(paths, RUN)
    assert contents(paths.root) == {"run.json": garbage}


@pytest.mark.parametrize("field", ["spec", "layout", "genesis_root", "admission", "bootstrap"])
@pytest.mark.parametrize("value", [None, 7, "zz"])
def test_a_damaged_field_is_no_description(paths, membership, field, value):
    if (field, value) == ("bootstrap", "zz"):
        value = 7  # any text is a sequence of texts
    directory = StateDirectory(paths, RUN)
    directory.remember(membership)
    fields = json.loads(paths.run.read_bytes())
    paths.run.write_text(json.dumps(fields | {field: value}))
    with pytest.raises(StateOfAnotherRun):
        directory.recall()
    directory.close()


def test_a_file_in_place_of_the_directory_is_refused(paths):
    paths.root.write_text("mine")
    with pytest.raises(StateDirectoryUnusable, match="--state-dir"):
        StateDirectory(paths, RUN)
    assert paths.root.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_ours_is_refused(paths):
    paths.root.mkdir(mode=0o500)
    try:
        with pytest.raises(StateDirectoryUnusable, match="Permission denied"):
            StateDirectory(paths, RUN)
    finally:
        paths.root.chmod(0o700)  # else whoever clears the folder is told that it cannot


def test_a_lock_that_holds_something_is_not_emptied(paths):
    paths.root.mkdir()
    paths.lock.write_text("mine")
    StateDirectory(paths, RUN).close()
    assert paths.lock.read_text() == "mine"


def test_nothing_is_expected_of_a_directory_that_is_not_there(paths):
    expect_run(paths, RUN)
    assert not paths.root.exists()


def test_every_refusal_is_bad_input():
    for kind in (StateDirectoryInUse, StateDirectoryUnusable, StateOfAnotherRun):
        assert issubclass(kind, StateDirectoryError)
        assert issubclass(kind, ValueError)


# addresses


def test_a_large_steady_swarm_changes_nothing():
    known = [f"/peer/{i}" for i in range(3 * MAX_BOOTSTRAP)]
    kept = addresses_to_keep(["/own"], ["/own"], known)
    assert len(kept) == MAX_BOOTSTRAP
    for turn in range(1, 20):
        assert addresses_to_keep(["/own"], kept, known[turn:] + known[:turn]) == kept


def test_who_left_makes_room_for_who_came():
    known = [f"/peer/{i}" for i in range(MAX_BOOTSTRAP)]
    kept = addresses_to_keep(["/own"], [], known)
    assert kept == ("/own", *known[:-1])
    changed = addresses_to_keep(["/own"], kept, [*known[1:-1], "/new"])
    assert changed == ("/own", *known[1:-1], "/new")


def test_who_left_is_kept_while_there_is_room():
    assert addresses_to_keep(["/own"], ["/own", "/gone"], []) == ("/own", "/gone")
