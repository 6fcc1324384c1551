"""`atoll invite` on the coordinator's machine: which peers an invite lists as further entries."""

import pytest

from atoll.coordinator.invites import BASE_FILE
from atoll.coordinator.run.files import KNOWN_FILE
from atoll.coordinator.run.invite import MAX_BOOTSTRAP, Invite
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from support.commands import INVITE, contents, refused

NODE = "/ip4/192.0.2.1/tcp/7701/p2p/node"
PEERS = [f"/ip4/192.0.2.{n}/tcp/4001/p2p/peer-{n}" for n in range(2, 30)]


@pytest.fixture
def state(tmp_path):
    """The directory of a coordinator that has run, and knows no peer."""
    folder = tmp_path / "state"
    folder.mkdir()
    RunKeys.load_or_create(folder / KEYS_FILE)
    invite = Invite.decode(INVITE)
    fields = {"run_id": invite.run_id, "run_key": invite.run_key, "tls_sha256": invite.tls_sha256}
    first = Invite(addresses=invite.addresses, bootstrap=(NODE,), token=b"first", **fields)
    (folder / BASE_FILE).write_text(first.encode())
    return folder


def test_an_invite_lists_one_address_of_each_peer_that_can_be_dialed(atoll, state):
    behind = f"{PEERS[0]}/p2p-circuit/p2p/behind"
    other_way = "/ip6/2001:db8::2/tcp/4001/p2p/peer-2"
    (state / KNOWN_FILE).write_text("\n".join([behind, PEERS[0], other_way, *PEERS[1:]]))
    result = atoll("invite", state, "--entries", 3)
    assert Invite.decode(result.out).bootstrap == (NODE, *PEERS[:3])
    assert Invite.decode(atoll("invite", state).out).bootstrap == (NODE,)


def test_no_invite_lists_more_than_it_can(atoll, state):
    invite = Invite.decode((state / BASE_FILE).read_text())
    nodes = tuple(f"/ip4/192.0.2.1/tcp/{n}/p2p/node" for n in range(1, MAX_BOOTSTRAP - 1))
    fields = {name: getattr(invite, name) for name in ("addresses", "run_id", "run_key")}
    full = Invite(bootstrap=nodes, tls_sha256=invite.tls_sha256, token=b"first", **fields)
    (state / BASE_FILE).write_text(full.encode())
    (state / KNOWN_FILE).write_text("\n".join(PEERS))
    listed = Invite.decode(atoll("invite", state, "--entries", 8).out).bootstrap
    assert listed == (*nodes, *PEERS[:2])


def test_without_a_peer_that_can_be_dialed_no_invite_is_issued(atoll, state):
    (state / KNOWN_FILE).write_text(f"{PEERS[0]}/p2p-circuit/p2p/behind")
    before = contents(state)
    assert "no peer that others can dial" in refused(atoll("invite", state, "--entries", 1))
    assert "expected 1 to 8" in refused(atoll("invite", state, "--entries", 9))
    assert "got an invite" in refused(atoll("invite", INVITE, "--entries", 1))
    assert contents(state) == before
