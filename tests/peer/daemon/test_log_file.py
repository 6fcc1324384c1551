"""Where a daemon's messages go."""

import logging

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.peer.daemon import process as daemon
from atoll.peer.daemon.membership import StateOfAnotherRun
from atoll.peer.daemon.process import DaemonOptions, PeerDaemon
from atoll.peer.daemon.session import LinkOptions
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

    monkeypatch.setattr(daemon.Link, "open", open_link)
    paths = PeerPaths(root=tmp_path)
    if stored is not None:
        paths.run.write_text(stored)
    link = LinkOptions(invite=INVITE, state_dir=tmp_path)
    with pytest.raises(StateOfAnotherRun):
        PeerDaemon(DaemonOptions(link=link), on_event=lambda event: None).run()
    assert paths.messages.exists() is logged
