"""Where a daemon's messages go."""

import logging

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.peer.daemon import process
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import RunOptions, Stop, join_and_train
from atoll.peer.daemon.state_directory import StateOfAnotherRun
from atoll.peer.paths import PeerPaths

INVITE = Invite(
    addresses=("127.0.0.1:9",), run_id=b"\x01" * 32, run_key=bytes(32), tls_sha256=bytes(32)
)


@pytest.mark.parametrize(("stored", "logged"), [('{"run_id": "09"}', False), (None, True)])
def test_the_state_directory_of_another_run_gets_none(tmp_path, monkeypatch, stored, logged):
    """Whatever else in this process has something to say."""

    def open_link(*args, **kwargs):
        logging.getLogger("atoll").warning("something else")
        raise StateOfAnotherRun("found out late")

    monkeypatch.setattr(process, "NetworkProcess", open_link)
    paths = PeerPaths(root=tmp_path)
    if stored is not None:
        paths.run.write_text(stored)
    options = RunOptions(peer=PeerOptions(invite=INVITE, state_dir=tmp_path))
    with pytest.raises(StateOfAnotherRun):
        join_and_train(options, on_event=lambda event: None, stop=Stop())
    assert paths.messages.exists() is logged
