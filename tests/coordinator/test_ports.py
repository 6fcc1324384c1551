"""Which ports joiners have reached from outside."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.ports import MAX_WATCHED, WAIT_S, Ports
from atoll.coordinator.relocating import OwnPlace
from atoll.coordinator.service.watching import PortsWatch

OURS, THEIRS = "8.8.4.4", "1.1.1.1"
DIALED_US = {"A": [f"/ip4/{THEIRS}/tcp/40000"]}


@pytest.fixture
def ports(tmp_path: Path) -> Ports:
    return Ports.recalled(7700, 7701, {OURS}, tmp_path / "ports.json")


def come(ports: Ports, peer: str = "A", *, is_reached: bool = False) -> str:
    line = ports.joined(peer, THEIRS)
    ports.probed(peer, is_reached=is_reached, now_s=0.0)
    return line


def test_nobody_has_tried(ports: Ports) -> None:
    assert str(ports) == "no peer has tried ports 7700 and 7701 from outside yet"
    assert not ports.is_wrong and not ports.is_known


@pytest.mark.parametrize("host", ["", "10.0.0.9", "127.0.0.1", OURS, "fd00::1", "100.64.0.1"])
def test_a_joiner_from_inside_proves_nothing(ports: Ports, host: str) -> None:
    assert ports.joined("A", host) == ""
    ports.probed("A", is_reached=False, now_s=0.0)
    assert ports.look({"A"}, DIALED_US, WAIT_S) == ""
    assert not ports.is_known and not ports.is_watching


def test_both_ports_were_reached(ports: Ports) -> None:
    assert "port 7700 was reached from outside (by A)" in come(ports)
    assert "7700 and 7701 were reached" in ports.look({"A"}, DIALED_US, 2.0)
    assert come(ports, "B") == "" and not ports.is_watching


def test_a_closed_second_port_is_found_after_a_while(ports: Ports) -> None:
    come(ports)
    assert ports.look({"A"}, {}, WAIT_S - 1) == ""
    line = ports.look({"A"}, {}, WAIT_S)
    assert line.startswith("A reached port 7700 from outside, but not port 7701: forward TCP")
    assert ports.is_wrong
    assert come(ports, "B") == ""  # said once
    assert ports.look({"A", "B"}, {}, 2 * WAIT_S) == ""


def test_a_port_opened_later_is_reported(ports: Ports) -> None:
    come(ports)
    ports.look({"A"}, {}, WAIT_S)
    come(ports, "B")
    assert "were reached" in ports.look({"B"}, {"B": DIALED_US["A"]}, WAIT_S)
    assert not ports.is_wrong


def test_a_joiner_that_went_away_proves_nothing(ports: Ports) -> None:
    come(ports)
    assert ports.look(set(), {}, WAIT_S) == ""
    assert not ports.is_wrong and not ports.is_watching


def test_a_connection_that_we_may_have_made_proves_nothing(ports: Ports) -> None:
    come(ports, is_reached=True)
    assert ports.look({"A"}, DIALED_US, 2.0) == ""
    assert ports.p2p.found == "untried" and not ports.is_watching


def test_a_joiner_whose_router_opened_its_port_proves_nothing(ports: Ports) -> None:
    come(ports)
    ports.probed("A", is_reached=True, now_s=1.0)  # by UPnP, after a first try without
    assert ports.look({"A"}, DIALED_US, 2.0) == ""
    assert ports.p2p.found == "untried"


def test_a_connection_from_inside_proves_nothing(ports: Ports) -> None:
    come(ports)
    inside = {"A": ["/ip4/10.0.0.9/tcp/4001", f"/ip4/{OURS}/tcp/4001"]}
    assert ports.look({"A"}, inside, 2.0) == ""
    assert ports.p2p.found == "untried"


def test_joiners_under_many_keys_are_bounded(ports: Ports) -> None:
    for number in range(5 * MAX_WATCHED):
        ports.joined(f"J{number}", THEIRS)
        ports.joined(f"P{number}", THEIRS)
        ports.probed(f"P{number}", is_reached=False, now_s=0.0)
    assert len(ports._came) <= MAX_WATCHED and len(ports._watched) <= MAX_WATCHED


def test_the_next_start_knows_what_was_found(ports: Ports, tmp_path: Path) -> None:
    come(ports)
    ports.look({"A"}, {}, WAIT_S)
    path = tmp_path / "ports.json"
    assert str(Ports.recalled(7700, 7701, (), path)) == str(ports)
    moved = Ports.recalled(7700, 7801, (), path)  # nobody has tried the new one
    assert moved.is_known and moved.p2p.found == "untried"


@pytest.mark.parametrize(
    "kept",
    [b"\xff", b"[]", b"{" * 5000, b'{"grpc": 3}', b'{"p2p": {"port": 7701, "found": "closed"}}'],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, kept: bytes) -> None:
    path = tmp_path / "ports.json"
    path.write_bytes(kept)
    assert not Ports.recalled(7700, 7701, (), path).is_known


def test_a_name_with_escapes_is_not_taken_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    path.write_text(json.dumps({"grpc": {"port": 7700, "found": "reached", "by": "\x1b[2J"}}))
    assert not Ports.recalled(7700, 7701, (), path).is_known


def test_findings_become_events_of_the_run(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real joiner, whose loopback address stands for a public one."""
    monkeypatch.setattr("atoll.coordinator.ports.is_public", lambda host: bool(host))
    monkeypatch.setattr("atoll.coordinator.service.watching.LOOK_S", 3600.0)
    seconds = [0.0]

    async def nobody() -> dict[str, list[str]]:
        return {}

    async def main() -> None:
        watches = kept_watches(monkeypatch, lambda: seconds[0])
        async with kit.net(tmp_path / "run", start_node=fake_node) as net:
            assert net.up.ports is not None and not net.up.ports.is_known
            client = net.client(0)
            await client.join()
            assert await client.probe(1, bytes(16)) == ("127.0.0.1", False)
            await client.heartbeat(net.swarm.status(0))
            (watch,) = watches
            seconds[0] = WAIT_S
            monkeypatch.setattr(net.up.coordinator.presence, "alive", alive_of(net))
            await watch.look(nobody)
            events = (await client.status()).events
            assert [e.level for e in events][-2:] == ["info", "warning"]
            assert "but not port 7701: forward TCP port 7701" in events[-1].text
        async with kit.net(tmp_path / "run", start_node=fake_node) as net:
            assert net.up.ports is not None and net.up.ports.is_wrong

    kit.run(main())


def alive_of(net: Any) -> Callable[[float], list[Any]]:
    known = net.up.coordinator.presence.peers.newest(9)
    return lambda now_s: known


def kept_watches(monkeypatch: pytest.MonkeyPatch, steady: Callable[[], float]) -> list[PortsWatch]:
    made: list[PortsWatch] = []

    class Kept(PortsWatch):
        def __init__(self, coordinator: Any) -> None:
            super().__init__(coordinator, steady)
            made.append(self)

    monkeypatch.setattr("atoll.coordinator.service.server.PortsWatch", Kept)
    return made


async def fake_node(request: object) -> Any:
    return FakeNode()


async def _nothing(*_: object) -> None:
    """Find nobody."""


class FakeNode:
    addresses = ("/ip4/192.0.2.1/tcp/7701/p2p/12D3KooW",)

    def recover(self, _: str) -> Callable[..., Awaitable[None]]:
        """Nobody is there to recover from."""
        return _nothing

    def ask_head(self, _: str) -> Callable[..., Awaitable[None]]:
        """Nobody answers."""
        return _nothing

    async def introduce(self, _: bytes) -> bytes:
        """Nobody is known."""
        return b""

    def tell_place(self, place: OwnPlace) -> None:
        """Nobody to tell."""

    async def direct_connections(self) -> dict[str, list[str]]:
        """Nobody is connected."""
        return {}

    async def close(self) -> None:
        """Leave nothing behind."""
