"""Followers: a whole log beside the coordinator's, and a folder of their own."""

import json
import threading
from contextlib import closing

import pytest

from atoll.coordinator.past_states import run_folder, state_after
from atoll.coordinator.recorded import read
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.store import LogStore
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.followed import FollowOptions
from atoll.peer.daemon.following import Follower
from atoll.peer.daemon.membership import Membership, StateDirectory
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.state_directory import StateDirectoryUnusable
from atoll.peer.paths import PeerPaths
from support.organiser import LOOPBACK


def followed(invite, folder, events, every=2):
    peer = PeerOptions(invite=invite, state_dir=folder, listen=LOOPBACK, role="follower")
    options = FollowOptions(peer=peer, checkpoint_every=every)
    said = lambda level, text: events.append(f"{level}: {text}")  # noqa: E731
    return closing(Follower(options, said, threading.Event()))


def stored(folder):
    """Return the chain of a folder's log, and the first position with all updates."""
    with closing(LogStore.reading(folder / "log")) as store:
        return store.head.chain, store.first_with_bodies()


def test_a_follower_and_a_peer_share_no_folder(tmp_path):
    """A peer would prune the log that a follower keeps."""
    for role, follows in (("follower", False), ("trainer", True), ("keeper", True)):
        membership = Membership(
            spec=RunSpec(),
            layout=Layout(names=("w",), shapes=((1000,),)),
            genesis_root=bytes(32),
            admission=b"",
            bootstrap=(),
            role=role,
        )
        raw = membership.to_json(bytes(32))
        assert Membership.from_json(raw).role == json.loads(raw)["role"] == role
        with closing(StateDirectory(PeerPaths(root=tmp_path / role), bytes(32))) as directory:
            directory.expect_role(follows=follows)
            directory.remember(membership)
            directory.expect_role(follows=not follows)
            with pytest.raises(StateDirectoryUnusable, match="name another with --"):
                directory.expect_role(follows=follows)


@pytest.mark.exhaustive  # with processes: tests/test_follow_processes.py
def test_a_follower_has_all_of_a_run_that_began_without_it(organise, kit, start, tmp_path):
    organiser = organise(kit.tiny_spec(run={"rounds": 8}))
    trainer = start(organiser.invite, "one")
    kit.until(lambda: organiser.status().position >= 3, "rounds")
    folder, events = tmp_path / "follower", []
    with followed(organiser.invite, folder, events) as follower:
        kit.until(lambda: follower.place.is_complete, "the follower has all rounds")
        assert not follower.followed.runs[0].ctx.parts._parts  # a body a round, for weeks
        assert trainer.join() is True
        assert "follower" in {peer.role for peer in organiser.status().peers}
    status = read(folder).status
    assert (status.position, status.chain) == (8, organiser.status().chain), events
    assert stored(folder) == (bytes.fromhex(status.chain), 0)
    assert (folder / "checkpoints" / "tiny-00000008.safetensors").exists()
    assert run_folder(folder / "checkpoints") == folder.absolute()
    assert state_after(folder, 1).position == 1
