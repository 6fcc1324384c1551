"""Dials of the transport over libp2p end in time."""

import asyncio

import pytest

from atoll.dht import libp2p
from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.p2pd import P2pdError
from atoll.dht.testing.virtualtime import run_virtual
from atoll.dht.transport import PeerUnreachable, TransportError


class Deaf:
    """Stands in for a p2pd whose dials take as long as they may, and fail."""

    peer_id = "a"
    addresses = ()

    def __init__(self):
        self.limits_s = []

    async def connected(self):
        return set()

    async def dial(self, peer, addresses, *, timeout_s):
        self.limits_s.append(timeout_s)
        await asyncio.sleep(min(timeout_s, 1.0))
        raise P2pdError("nobody answers")


def test_each_dial_may_take_what_is_left_of_the_time():
    async def main():
        daemon = Deaf()
        transport = LibP2PTransport(daemon, run_id="run")
        with pytest.raises(TransportError):
            await transport.connect("b", ["/ip4/10.0.0.1/tcp/1"], timeout_s=3.0)
        first, *later = daemon.limits_s
        assert first == pytest.approx(3.0, abs=0.1)
        assert later and max(later) <= 2.0
        await transport.close()

    run_virtual(main())


REFUSED = "connect: connection refused"
BACKOFF = "dial backoff"
NO_ROUTE = "connect: no route to host"


class Failing(Deaf):
    """Fails each dial at once, for the next of these reasons."""

    def __init__(self, *reasons):
        super().__init__()
        self.reasons = list(reasons)

    async def dial(self, peer, addresses, *, timeout_s):
        self.limits_s.append(timeout_s)
        reason = self.reasons.pop(0) if self.reasons else BACKOFF
        lines = (f"  * [{address}] {reason}" for address in addresses)
        raise P2pdError("\n".join([f"failed to dial {peer}: all dials failed", *lines]))


async def unheard(addresses, timeout_s):
    return False


@pytest.mark.parametrize(
    ("reasons", "is_gone"),
    [([REFUSED], True), ([BACKOFF, REFUSED], True), ([NO_ROUTE], False), ([], False)],
)
def test_where_nobody_listens_no_dial_is_repeated(monkeypatch, reasons, is_gone):
    """The members of a group wait for the end of these dials before they turn to another leader."""
    monkeypatch.setattr(libp2p, "refused", unheard)

    async def main():
        daemon = Failing(*reasons)
        transport = LibP2PTransport(daemon, run_id="run")
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                await transport.connect("b", ["/ip4/10.0.0.1/tcp/1"], timeout_s=3.0)
        # Each time until the refusal; and the second time, libp2p does not dial yet.
        assert (len(daemon.limits_s) == len(reasons) + 1) == is_gone
        await transport.close()

    run_virtual(main())


def test_a_machine_that_libp2p_does_not_dial_now_is_asked_beside_it(monkeypatch):
    """The DHT in p2pd dialed the dead peer first, and only that dial was told the reason."""
    asked = []

    async def refused(addresses, timeout_s):
        asked.append(tuple(addresses))
        return True

    monkeypatch.setattr(libp2p, "refused", refused)

    async def main():
        daemon = Failing()
        transport = LibP2PTransport(daemon, run_id="run")
        for _ in range(2):
            with pytest.raises(PeerUnreachable, match="refused the connection"):
                await transport.connect("b", ["/ip4/10.0.0.1/tcp/1"], timeout_s=4.5)
        assert len(daemon.limits_s) == 2
        assert asked == [("/ip4/10.0.0.1/tcp/1",)]
        await transport.close()

    run_virtual(main())


NO_NETWORK = "connect: network is unreachable"


@pytest.mark.parametrize(
    ("by_ipv4", "by_ipv6"),
    [
        ((REFUSED, BACKOFF), (REFUSED, REFUSED)),  # the second dial names both families
        ((REFUSED, BACKOFF), (NO_NETWORK, NO_NETWORK)),  # this machine has no IPv6
    ],
)
def test_where_nobody_listens_no_dial_of_two_families_is_repeated(by_ipv4, by_ipv6):
    """Each dial gives a reason for every address that libp2p knows of the peer."""
    dials = [
        P2pdError(f"all dials failed\n  * [/ip6] {six}\n  * [/ip4] {four}")
        for four, six in zip(by_ipv4, by_ipv6, strict=True)
    ]

    class Dead(Deaf):
        async def dial(self, peer, addresses, *, timeout_s):
            self.limits_s.append(timeout_s)
            raise dials[len(self.limits_s) - 1]

    async def main():
        daemon = Dead()
        transport = LibP2PTransport(daemon, run_id="run")
        ways = ["/ip4/10.0.0.1/tcp/1", "/ip6/2a77::2/tcp/1"]
        with pytest.raises(PeerUnreachable, match="refused the connection"):
            await transport.connect("b", ways, timeout_s=3.0)
        assert len(daemon.limits_s) == 2
        await transport.close()

    run_virtual(main())


def test_a_relay_that_hangs_keeps_nobody_from_the_next(monkeypatch):
    """A peer's record names a relay that died for some seconds more."""

    class Half(Deaf):
        def __init__(self):
            super().__init__()
            self.reached = set()

        async def connected(self):
            return set(self.reached)

        async def dial(self, peer, addresses, *, timeout_s):
            if peer == "dead":
                await asyncio.sleep(timeout_s)
                raise TimeoutError
            self.reached.add(peer)

    async def main():
        transport = LibP2PTransport(Half(), run_id="run", relaying=object())
        ways = [f"/ip4/10.0.0.1/tcp/1/p2p/{relay}/p2p-circuit" for relay in ("dead", "alive")]
        monkeypatch.setattr(
            libp2p, "relay_of", lambda way: way.split("/")[6] if "circuit" in way else None
        )
        began_s = asyncio.get_running_loop().time()
        await transport.connect("b", ways, timeout_s=4.5)
        assert asyncio.get_running_loop().time() - began_s < 2.0  # on the virtual clock
        assert transport.relayed == {"b"}
        await transport.connect("b", ways, timeout_s=4.5)
        await transport.close()

    run_virtual(main())
