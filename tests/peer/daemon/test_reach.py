"""Dial-back by the coordinator, and what a peer announces after it."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.dht.addresses import has_ipv6, peer_of
from atoll.dht.identity import Identity
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


def found(client, folder, listen=("/ip4/0.0.0.0/tcp/0",)):
    return asyncio.run(probe(client, listen, folder / "reach.json"))


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
        seen=(), relays=(), peer_id="P", addresses=[own], daemon=SimpleNamespace(options=options)
    )
    reachability = Reachability(node, Reach(), [bootstrap])
    assert node.relays == relays
    assert ("cannot be asked yet" in str(reachability)) is bool(relays)


def test_a_peer_announces_how_it_is_reached():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P")
    open_ = Reach(address="203.0.114.9", port=4001)
    assert "203.0.114.9/tcp/4001" in str(Reachability(node, open_, [COORDINATOR, OTHER]))
    assert (node.seen, node.relays) == ((open_.multiaddr,), ())

    node = SimpleNamespace(seen=(), relays=(), peer_id="P")
    hidden = Reach(address="203.0.114.9", port=4001, is_dialed=False)
    assert "through relays" in str(Reachability(node, hidden, [COORDINATOR, OTHER]))
    assert (node.seen, node.relays) == ((), (COORDINATOR,))


def record(peer, *addresses, relay_mbit_s=25.0):
    return SimpleNamespace(
        addresses=addresses,
        relay_mbit_s=relay_mbit_s,
        is_dialed=not any("p2p-circuit" in address for address in addresses),
        peer_id=peer,
    )


def test_relays_are_public_peers_first_and_stay_while_they_are_here():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P")
    hidden = Reach(address="203.0.114.9", port=4001, is_dialed=False)
    reachability = Reachability(node, hidden, [COORDINATOR, OTHER])
    at = {peer: f"/ip4/203.0.114.7/tcp/1/p2p/{peer}" for peer in "ABCDEF"}
    records = {peer: record(peer, address) for peer, address in at.items()}
    records["E"] = record("E", at["E"], relay_mbit_s=0.0)
    records["F"] = record("F", f"{at['F']}/p2p-circuit/p2p/F")
    reachability.look(records, {"E", "F"})
    assert node.relays == (COORDINATOR,)
    reachability.look(records, set("AE"))
    assert node.relays == (at["A"], COORDINATOR)
    reachability.look(records, set("ABCDEF"))
    assert at["A"] == node.relays[0] and len(node.relays) == 3
    chosen = node.relays
    for here in ("ABCDEF", "FEDCBA"):
        reachability.look({peer: records[peer] for peer in here}, set(here))
        assert node.relays == chosen
    del records["A"]
    reachability.look(records, set("BCDEF"))
    assert chosen[1] == node.relays[0] and at["A"] not in node.relays


def test_a_peer_that_others_dial_has_no_relays():
    node = SimpleNamespace(seen=(), relays=(), peer_id="P")
    reachability = Reachability(node, Reach(address="203.0.114.9", port=1), [COORDINATOR])
    reachability.look({"A": record("A", "/ip4/203.0.114.7/tcp/1/p2p/A")}, {"A"})
    assert node.relays == () and reachability.kind == "direct"


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
    node = SimpleNamespace(seen=(), relays=(), peer_id="P", transport=transport)
    behind = Reach(address="203.0.114.9", port=1, is_dialed=False)
    assert Reachability(node, behind, [COORDINATOR]).kind == kind
