"""A newcomer asks nodes where the coordinator is."""

import asyncio

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.relocation import Relocation, Whereabouts
from atoll.dht.p2pd import P2pd, P2pdError
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import PeerUnreachable
from atoll.peer.daemon.reach import lookup
from atoll.peer.daemon.reach.lookup import look_up

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
INVITE = Invite(
    addresses=("old:7700",),
    run_id=b"\x07" * 32,
    run_key=KEY.public_key().public_bytes_raw(),
    tls_sha256=bytes(32),
)
RUN = INVITE.run_id.hex()


def record(serial, key=KEY):
    there = Relocation(serial=serial, addresses=(f"new-{serial}:7700",))
    return there.sign(INVITE.run_id, key.sign)


class Daemon:
    """A p2pd: some peers can be dialed, and show a notice."""

    def __init__(self, shown):
        self.shown, self.connected, self.is_closed = shown, set(), False

    async def dial(self, peer, addresses, *, timeout_s):
        if peer not in self.shown:
            await asyncio.sleep(timeout_s)
            raise PeerUnreachable(f"{addresses} is dead", peer=peer)
        self.connected.add(peer)

    async def read(self, daemon, peer, run_id, *, timeout_s):
        assert (daemon, run_id) == (self, RUN) and peer in self.connected
        return self.shown[peer]

    async def close(self):
        self.is_closed = True


def ask(monkeypatch, shown, known=b""):
    """Return whether a newcomer learns something, and the addresses that it knows then."""
    whereabouts, daemon = Whereabouts(INVITE), Daemon(shown)
    if known:
        whereabouts.take(known)

    async def start(identity, options):
        return daemon

    monkeypatch.setattr(P2pd, "start", start)
    monkeypatch.setattr(lookup, "read_notice", daemon.read)
    asked = [f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}" for peer in ("dead", *shown)]
    found = run_virtual(look_up(whereabouts, [*asked, "no multiaddr"], RUN))
    assert daemon.is_closed
    return found, whereabouts.addresses


def test_a_liar_and_a_dead_node_do_not_hide_the_place(monkeypatch):
    shown = {"liar": record(9, OTHER), "idle": b"", "honest": record(5)}
    assert ask(monkeypatch, shown) == (True, ("new-5:7700", "old:7700"))


def test_an_older_record_is_no_news(monkeypatch):
    shown = {"left behind": record(4), "with us": record(5)}
    assert ask(monkeypatch, shown, known=record(5)) == (False, ("new-5:7700", "old:7700"))


def test_nobody_there_is_no_failure(monkeypatch):
    assert ask(monkeypatch, {}) == (False, ("old:7700",))

    async def broken(identity, options):
        raise P2pdError("no p2pd")

    monkeypatch.setattr(P2pd, "start", broken)
    for asked in ([], ["/ip4/192.0.2.1/tcp/4001/p2p/dead"]):
        assert not run_virtual(look_up(Whereabouts(INVITE), asked, RUN))
