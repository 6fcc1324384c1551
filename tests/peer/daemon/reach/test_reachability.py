"""Dial-back by the coordinator, and what a peer announces after it."""

import asyncio
import json
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.dht.addresses import has_ipv6, peer_of
from atoll.dht.identity import Identity
from atoll.dht.upnp import Forwarding, UpnpError
from atoll.peer.daemon.reach import reachability as reach_module
from atoll.peer.daemon.reach.reachability import Reach, Reachability, is_direct, probe

COORDINATOR = f"/ip4/203.0.114.1/tcp/7701/p2p/{Identity.ephemeral().peer_id}"
OTHER = f"/ip4/203.0.114.2/tcp/7701/p2p/{Identity.ephemeral().peer_id}"
LOCAL = "/ip4/192.168.1.4/tcp/7701/p2p/C"


class Coordinator:
    """Dials back on loopback, or says that it could not."""

    def __init__(self, *, sees="203.0.114.9", lets_in=True, is_away=False, dials="127.0.0.1"):
        self.dials = dials
        self.sees, self.lets_in, self.is_away = sees, lets_in, is_away
        self.ports = []

    async def probe(self, port, nonce):
        if self.is_away:
            raise CoordinatorUnreachable("away")
        self.ports.append(port)
        reader, writer = await asyncio.open_connection(self.dials, port)
        assert await reader.readexactly(16) == nonce
        writer.close()
        return self.sees, self.lets_in


def found(client, folder, listen=("/ip4/0.0.0.0/tcp/0",), forwarding=None):
    return asyncio.run(
        probe(client, listen, folder / "reach.json", forwarding or Forwarding(nobody))
    )


async def nobody(inside):
    raise UpnpError("no router answers")


class Relays:
    """The relaying of a node, as far as its rate is set."""

    def allow(self, mbit_s):
        self.mbit_s = mbit_s


def test_the_port_that_was_tried_is_listened_on(tmp_path):
    client = Coordinator()
    reach, listen = found(client, tmp_path)
    (port,) = client.ports
    assert reach == Reach(address="203.0.114.9", port=port, is_dialed=True)
    assert listen == (f"/ip4/0.0.0.0/tcp/{port}",)
    assert reach.multiaddr == f"/ip4/203.0.114.9/tcp/{port}"
    # A router may forward it: the next start takes it again.
    assert found(Coordinator(), tmp_path)[1] == listen


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_all_of_ipv6_gets_the_same_port_and_is_dialed_back_too(tmp_path):
    client = Coordinator(sees="2a00::9", dials="::1")
    reach, listen = found(client, tmp_path, ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"))
    (port,) = client.ports
    assert listen == (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")
    assert reach.multiaddr == f"/ip6/2a00::9/tcp/{port}"


def test_a_port_that_was_closed_is_not_tried_again(tmp_path):
    """Its router has flows to the coordinator from it, and lets that in, but nobody else."""
    closed, _ = found(Coordinator(lets_in=False), tmp_path)
    again, _ = found(Coordinator(), tmp_path)
    assert again.port != closed.port
    named, _ = found(Coordinator(lets_in=False), tmp_path, (f"/ip4/0.0.0.0/tcp/{closed.port}",))
    assert named.port == closed.port  # the owner's choice


def test_a_port_of_before_that_is_taken_is_replaced(tmp_path):
    _, (first,) = found(Coordinator(), tmp_path)
    with socket.create_server(("0.0.0.0", int(first.rpartition("/")[2]))):
        _, (second,) = found(Coordinator(), tmp_path)
    assert first != second


def test_without_the_coordinator_the_last_answer_counts(tmp_path):
    away = Coordinator(is_away=True)
    assert found(away, tmp_path) == (Reach(), ("/ip4/0.0.0.0/tcp/0",))
    before, _ = found(Coordinator(lets_in=False), tmp_path)
    assert found(away, tmp_path)[0] == before
    (tmp_path / "reach.json").write_text(json.dumps({"port": "x"}))
    assert found(away, tmp_path)[0] == Reach()


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/0", "/dns4/here/tcp/1", "/unix/x"])
def test_a_peer_on_loopback_asks_nobody(tmp_path, address):
    client = Coordinator()
    assert found(client, tmp_path, (address,)) == (Reach(), (address,))
    assert client.ports == []


@pytest.mark.parametrize(
    ("reach", "coordinator", "direct"),
    [
        (Reach(address="203.0.114.9", port=1), [COORDINATOR], True),
        (Reach(address="203.0.114.9", port=1, is_dialed=False), [COORDINATOR], False),
        (Reach(address="192.168.1.5", port=1), [COORDINATOR, LOCAL], False),
        (Reach(address="192.168.1.5", port=1), [LOCAL], True),
        (Reach(), [COORDINATOR], True),
        (Reach(address="2a00::9", port=1), [COORDINATOR], False),
        (Reach(address="2a00::9", port=1), ["/ip6/2a00::1/tcp/7701/p2p/C", LOCAL], True),
    ],
    ids=[
        "public",
        "router",
        "beside the coordinator",
        "local run",
        "never asked",
        "only by IPv6",
        "a run of IPv6",
    ],
)
def test_who_is_dialed_directly(reach, coordinator, direct):
    assert is_direct(reach, coordinator) is direct


@pytest.mark.parametrize(
    ("own", "announce", "bootstrap", "relays"),
    [
        ("/ip4/192.168.1.5/tcp/1", (), COORDINATOR, (COORDINATOR,)),
        ("/ip6/fd00::5/tcp/1", (), COORDINATOR, (COORDINATOR,)),
        ("/ip4/203.0.114.9/tcp/1", (), COORDINATOR, ()),
        ("/ip4/192.168.1.5/tcp/1", ("/ip4/192.168.1.5/tcp/1",), COORDINATOR, ()),
        ("/ip4/192.168.1.5/tcp/1", (), LOCAL, ()),
    ],
    ids=["private", "private IPv6", "public", "the owner's word", "local run"],
)
def test_private_addresses_stay_in_a_run_without_public_ones(own, announce, bootstrap, relays):
    options = SimpleNamespace(announce=announce)
    node = SimpleNamespace(
        seen=(),
        relays=(),
        peer_id="P",
        relaying=Relays(),
        addresses=[own],
        daemon=SimpleNamespace(options=options),
    )
    reachability = Reachability(node, Reach(), [bootstrap])
    assert node.relays == relays
    assert ("cannot be asked yet" in str(reachability)) is bool(relays)


def test_a_peer_announces_how_it_is_reached():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays())
    open_ = Reach(address="203.0.114.9", port=4001)
    assert "203.0.114.9/tcp/4001" in str(Reachability(node, open_, [COORDINATOR, OTHER]))
    assert (node.seen, node.relays) == ((open_.multiaddr,), ())

    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays())
    hidden = Reach(address="203.0.114.9", port=4001, is_dialed=False)
    told = str(Reachability(node, hidden, [COORDINATOR, OTHER]))
    assert "through relays, the coordinator" in told
    assert (node.seen, node.relays) == ((), (COORDINATOR,))


def record(peer, *addresses, relay_mbit_s=25.0):
    return SimpleNamespace(
        addresses=addresses,
        relay_mbit_s=relay_mbit_s,
        is_dialed=not any("p2p-circuit" in address for address in addresses),
        peer_id=peer,
    )


def test_relays_are_public_peers_first_and_stay_while_they_are_here():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays())
    hidden = Reach(address="203.0.114.9", port=4001, is_dialed=False)
    said = []
    reachability = Reachability(node, hidden, [COORDINATOR, OTHER], report=said.append)
    at = {peer: f"/ip4/203.0.114.7/tcp/1/p2p/{peer}" for peer in "ABCDEF"}
    records = {peer: record(peer, address) for peer, address in at.items()}
    records["E"] = record("E", at["E"], relay_mbit_s=0.0)
    records["F"] = record("F", f"{at['F']}/p2p-circuit/p2p/F")
    reachability.look(records, {"E", "F"})
    assert node.relays == (COORDINATOR,) and not said
    reachability.look(records, set("AE"))
    assert node.relays == (at["A"], COORDINATOR)
    reachability.look(records, set("AE"))
    assert said == ["relays of this peer: A and the coordinator"]
    reachability.look(records, set("ABCDEF"))
    assert at["A"] == node.relays[0] and len(node.relays) == 3
    chosen = node.relays
    for here in ("ABCDEF", "FEDCBA"):
        reachability.look({peer: records[peer] for peer in here}, set(here))
        assert node.relays == chosen
    del records["A"]
    reachability.look(records, set("BCDEF"))
    assert chosen[1] == node.relays[0] and at["A"] not in node.relays


def test_a_peer_that_others_dial_has_no_relays_and_relays_for_others():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays())
    direct = Reach(address="203.0.114.9", port=1)
    reachability = Reachability(node, direct, [COORDINATOR], relay_mbit_s=25.0)
    assert node.relaying.mbit_s == 25.0
    reachability.look({"A": record("A", "/ip4/203.0.114.7/tcp/1/p2p/A")}, {"A"})
    assert node.relays == () and reachability.kind == "direct"
    reachability.take(Reach(address="203.0.114.9", port=1, is_dialed=False))
    assert node.relaying.mbit_s == 0.0  # a laptop that moved behind a router
    reachability.take(replace(direct, by_upnp=True))
    assert node.relaying.mbit_s == 25.0 and reachability.kind == "upnp"
    assert "by UPnP" in str(reachability)


def test_a_hidden_peer_is_relayed_by_the_coordinator_at_its_new_address():
    moved = f"/ip4/203.0.114.99/tcp/7701/p2p/{peer_of(COORDINATOR)}"
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays())
    behind = Reach(address="203.0.114.9", port=1, is_dialed=False)
    reachability = Reachability(node, behind, [COORDINATOR])
    assert node.relays == (COORDINATOR,)
    node.relays = ("/ip4/203.0.114.7/tcp/1/p2p/A", COORDINATOR)
    reachability.follow([moved])
    assert node.relays == ("/ip4/203.0.114.7/tcp/1/p2p/A", moved)


@pytest.mark.parametrize(
    ("connected", "relayed", "kind"),
    [("", "", "relayed"), ("C", "", "relayed"), ("CA", "", "hole"), ("CA", "B", "relayed")],
)
def test_a_connection_to_the_coordinator_is_no_hole(connected, relayed, kind):
    """The last peer of a run has no other one."""
    of = {"C": peer_of(COORDINATOR)}
    transport = SimpleNamespace(
        connected=frozenset(of.get(name, name) for name in connected), relayed=frozenset(relayed)
    )
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", relaying=Relays(), transport=transport)
    behind = Reach(address="203.0.114.9", port=1, is_dialed=False)
    assert Reachability(node, behind, [COORDINATOR]).kind == kind


class Gateway:
    """A router that forwards, and a coordinator that finds ports open while it does."""

    def __init__(self, *, refuses=False):
        self.refuses, self.forwarded, self.asked, self.found = refuses, set(), [], []

    async def find(self, inside):
        self.found.append(inside)
        return self

    async def map(self, port):
        if self.refuses:
            raise UpnpError("the router refuses AddPortMapping (718)", 718)
        self.forwarded.add(port)

    async def unmap(self, port):
        self.forwarded.discard(port)

    async def probe(self, port, nonce):
        self.asked.append(port)
        return "203.0.114.9", port in self.forwarded


@pytest.fixture
def at_home(monkeypatch):
    monkeypatch.setattr(reach_module, "own_addresses", lambda: ["2a00::5", "192.168.1.5"])


def test_a_port_that_the_router_forwards_is_dialed_before_it_is_announced(at_home, tmp_path):
    router = Gateway()
    forwarding = Forwarding(router.find)
    reach, _ = found(router, tmp_path, forwarding=forwarding)
    assert (reach.is_dialed, reach.by_upnp) == (True, True)
    assert router.asked == [reach.port] * 2 and router.found == ["192.168.1.5"]
    assert router.forwarded == {reach.port} == {forwarding.port}
    # The lease of a process that was killed has not ended: it must be ours again.
    later = Forwarding(router.find)
    again, _ = found(router, tmp_path, forwarding=later)
    assert again == reach and later.port == reach.port
    asyncio.run(later.close())
    assert router.forwarded == set()
    away = Coordinator(is_away=True)
    assert found(away, tmp_path)[0] == Reach()  # nothing is forwarded without a request


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "behind another router"])
def test_a_mapping_through_which_nobody_comes_is_taken_back(at_home, tmp_path, refuses):
    router = Gateway(refuses=refuses)
    if not refuses:
        router.probe = Coordinator(lets_in=False).probe
    forwarding = Forwarding(router.find)
    reach, _ = found(router, tmp_path, forwarding=forwarding)
    assert (reach.is_dialed, reach.by_upnp) == (False, False)
    assert router.forwarded == set() and forwarding.port == 0
    assert ("718" in forwarding.refusal) is refuses


def test_no_router_is_asked_without_a_private_address(monkeypatch, tmp_path):
    monkeypatch.setattr(reach_module, "own_addresses", lambda: ["203.0.114.9"])
    router = Gateway()
    assert not found(router, tmp_path, forwarding=Forwarding(router.find))[0].is_dialed
    assert router.found == []


def test_after_a_move_the_port_of_p2pd_is_forwarded(at_home):
    router = Gateway()
    forwarding = Forwarding(router.find)
    listen = ("/ip4/0.0.0.0/tcp/4001",)
    reach = asyncio.run(reach_module.probe_again(router, listen, forwarding))
    assert reach == Reach(address="203.0.114.9", port=4001, by_upnp=True)
    assert 4001 not in router.asked and router.forwarded == {4001}
