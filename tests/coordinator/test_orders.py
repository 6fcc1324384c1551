"""The orders that a coordinator takes, keeps and gives to peers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.invites import evict
from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.orders import ORDERS_FILE, OrderDesk, OrderRefused, OrdersError, misfit
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.report.view import orders_text
from atoll.coordinator.rpc.client_errors import Busy, Evicted, Invalid, NotWelcome
from atoll.coordinator.rpc.orders import OrderClient
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import Identity
from atoll.optim.log.entry import verify_key
from atoll.optim.log.orders import (
    MAX_EVICTED,
    MAX_PENDING,
    Change,
    EvictPeer,
    Order,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RunSettings,
    SetCodec,
    SetInnerSteps,
    SetMinPeers,
    SetOuterMomentum,
    SetOuterRate,
    SetReducer,
    StopRun,
    sign_order,
)
from support import kit

KEYS = RunKeys.generate()
RUN = b"r" * 32
NONE = [RunSettings()]
PEERS = [Identity.ephemeral().peer_id for _ in range(MAX_EVICTED)]


def signed(number: int, change: Change, keys: RunKeys = KEYS, run_id: bytes = RUN) -> bytes:
    return sign_order(Order(run_id=run_id, number=number, change=change), keys.sign)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ORDERS_FILE


def desk_at(path: Path) -> OrderDesk:
    verify = partial(verify_key, KEYS.run_public_key)
    return OrderDesk(path, run_id=RUN, spec=kit.SPEC, verify_run=verify)


def test_orders_are_kept_over_a_restart(path: Path) -> None:
    desk = desk_at(path)
    orders = [signed(1, PauseRun()), signed(2, ResumeRun())]
    for order in orders:
        desk.give(order, NONE)
    again = desk_at(path)
    assert again.lacking(RunSettings()) == orders
    assert again.lacking(RunSettings(number=1)) == orders[1:]
    assert again.next_number(NONE) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_order_that_is_given_again_is_taken_once(path: Path) -> None:
    """The answer may have been lost."""
    desk = desk_at(path)
    order = desk.give(signed(1, PauseRun()), NONE)
    assert order is not None and order.number == 1
    assert desk.give(signed(1, PauseRun()), NONE) is None
    assert len(desk.lacking(RunSettings())) == 1


def test_an_order_out_of_its_turn_is_refused(path: Path) -> None:
    desk = desk_at(path)
    desk.give(signed(1, PauseRun()), NONE)
    for order in (signed(1, ResumeRun()), signed(3, ResumeRun())):
        with pytest.raises(OrderRefused, match="expected order 2"):
            desk.give(order, NONE)
    # The log knows more than this directory: it was restored from a copy.
    with pytest.raises(OrderRefused, match="expected order 8"):
        desk.give(signed(2, ResumeRun()), [RunSettings(number=7)])


def test_an_order_of_another_key_or_run_is_refused(path: Path) -> None:
    desk = desk_at(path)
    with pytest.raises(OrderRefused, match="signature of the organiser's key"):
        desk.give(signed(1, PauseRun(), RunKeys.generate()), NONE)
    with pytest.raises(OrderRefused, match="another run"):
        desk.give(signed(1, PauseRun(), run_id=b"s" * 32), NONE)
    with pytest.raises(OrderRefused, match=r"not a valid record|not msgpack"):
        desk.give(b"\x81", NONE)
    assert not path.exists()


def test_so_many_orders_wait_and_no_more(path: Path) -> None:
    desk = desk_at(path)
    for number in range(1, MAX_PENDING + 1):
        desk.give(signed(number, PauseRun()), NONE)
    with pytest.raises(OrderRefused, match="wait already"):
        desk.give(signed(MAX_PENDING + 1, PauseRun()), NONE)
    desk.give(signed(MAX_PENDING + 1, PauseRun()), [RunSettings(number=1)])


def test_a_peer_whose_eviction_waits_can_be_readmitted_always(path: Path) -> None:
    """It may be the only elector, and then nothing is decided before."""
    desk = desk_at(path)
    desk.give(signed(1, EvictPeer(peer_id=PEERS[0])), NONE)
    for number in range(2, MAX_PENDING):
        desk.give(signed(number, PauseRun()), NONE)
    for change in (PauseRun(), EvictPeer(peer_id=PEERS[1]), ReadmitPeer(peer_id=PEERS[1])):
        with pytest.raises(OrderRefused, match="room to readmit"):
            desk.give(signed(MAX_PENDING, change), NONE)
    desk.give(signed(MAX_PENDING, ReadmitPeer(peer_id=PEERS[0])), NONE)
    assert desk.evicted(NONE) == {}
    with pytest.raises(OrderRefused, match=r"16 orders wait already; .* online$"):
        desk.give(signed(MAX_PENDING + 1, PauseRun()), NONE)


def test_what_will_be_in_force_follows_from_what_waits(path: Path) -> None:
    desk = desk_at(path)
    desk.give(signed(1, SetInnerSteps(value=7)), NONE)
    desk.give(signed(2, PauseRun()), NONE)
    assert desk.settings(NONE, 4) == RunSettings(number=2, inner_steps=7, is_paused=True)


@pytest.mark.parametrize("text", ["[", '["zz"]', "[1]", '["81"]'])
def test_a_damaged_file_is_told(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(OrdersError, match="delete it"):
        desk_at(path)


SPECS: dict[str, dict[str, Any]] = {
    "ddp": {"outer": {"method": "ddp", "inner_steps": 1}},
    "noloco": {"outer": {"method": "noloco"}},
    "diloco": {},
    "streaming": {"outer": {"method": "diloco(count=3,tau=2)", "inner_steps": 30}},
    "sparseloco": {"outer": {"method": "sparseloco"}},
}


@pytest.mark.parametrize(
    ("method", "change", "why"),
    [
        ("diloco", SetInnerSteps(value=7), ""),
        ("diloco", SetOuterMomentum(value=0.5), ""),
        ("diloco", StopRun(after_round=5), ""),
        ("diloco", StopRun(after_round=6), "in any case"),
        ("ddp", SetInnerSteps(value=7), "every step"),
        ("ddp", SetOuterRate(value=0.5), "inner_scale"),
        ("ddp", PauseRun(), ""),
        ("diloco", SetCodec(value="int4"), ""),
        ("diloco", SetCodec(value="fp16"), ""),
        ("diloco", SetCodec(value="gzip"), "expected one of the codecs"),
        ("diloco", SetCodec(value="dct"), "other chunks"),
        ("diloco", SetCodec(value="powersgd"), "reduces no mean"),
        ("diloco", SetCodec(value="feedback"), "without feedback of its own"),
        ("diloco", SetCodec(value="ternary"), "error feedback is 1 with"),
        ("diloco", SetReducer(value="median"), ""),
        ("streaming", SetReducer(value="median"), "overlap, so its reducer cannot"),
        ("sparseloco", SetReducer(value="median"), "must be 'mean' with"),
        ("streaming", SetCodec(value="int4"), "overlap, so its codec cannot"),
        ("sparseloco", SetCodec(value="int4"), "reduces no mean"),
        ("noloco", PauseRun(), "no log"),
        ("noloco", EvictPeer(peer_id="1" * 52), "`atoll evict` removes a peer"),
    ],
)
def test_what_does_not_fit_a_run_is_told(method: str, change: Change, why: str) -> None:
    spec = RunSpec.from_dict(
        {"run": {"name": "test", "rounds": 6}, "round": {"min_peers": 2}} | SPECS[method]
    )
    assert why in misfit(spec, change) and bool(why) == bool(misfit(spec, change))


def test_min_peers_of_a_pipeline_has_no_effect() -> None:
    spec = RunSpec.from_dict(
        {"run": {"name": "test", "rounds": 6}, "topology": {"stages": 2}, "round": {"min_peers": 2}}
    )
    assert "one peer each" in misfit(spec, SetMinPeers(value=1))


# Over gRPC


def test_an_order_is_given_and_reaches_peers_until_it_is_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            clients = await net.started()
            organiser = OrderClient(net.up.invite)
            net.stack.push_async_callback(organiser.close)
            assert (await organiser.ask()).next_number == 1
            keys = net.up.coordinator.keys
            order = signed(1, SetInnerSteps(value=7), keys, net.run_id)
            standing = await organiser.give(order)
            assert (standing.next_number, standing.decided) == (2, 0)
            assert standing.settings.inner_steps == 7
            beat = await clients[0].heartbeat(net.swarm.status(0))
            assert beat.orders == (order,)
            status = await organiser.status()
            assert (status.orders_waiting, status.settings) == (1, {})

            log = net.up.coordinator.log
            entry = control(net, log, order)
            assert await net.publish(clients[0], entry, b"")
            assert (await organiser.ask()).decided == 1
            assert (await clients[0].heartbeat(net.swarm.status(0))).orders == ()
            status = await organiser.status()
            assert (status.orders_waiting, status.settings) == (0, {"inner_steps": 7.0})
            assert status.inner_steps == 7
            assert status.history[-1].left_out == []
            told = [event.text for event in status.events]
            assert "given: order 1: inner_steps is 7 from here on" in told
            assert "round 1: order 1: inner_steps is 7 from here on" in told

    kit.run(main())


def test_a_coordinator_that_lacks_rounds_takes_no_order(tmp_path: Path) -> None:
    """They may hold an order of its next number, as after a restore from an older copy."""

    async def main() -> None:
        async with kit.net(tmp_path) as net:
            await net.started()
            log, pause = net.up.coordinator.log, PauseRun()
            organiser = OrderClient(net.up.invite)
            net.stack.push_async_callback(organiser.close)
            log._epochs._known_rounds = 1
            order = signed(1, pause, net.up.coordinator.keys, net.run_id)
            with pytest.raises(Busy, match="lacks rounds that peers may have"):
                await organiser.give(order)
            log._epochs._known_rounds = 0
            await organiser.give(order)
            assert (await organiser.ask()).next_number == 2

    kit.run(main())


def test_orders_without_the_key_or_the_token_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            from dataclasses import replace

            organiser = OrderClient(net.up.invite)
            stranger = OrderClient(replace(net.up.invite, token=bytes(16)))
            for client in (organiser, stranger):
                net.stack.push_async_callback(client.close)
            with pytest.raises(Invalid, match="signature of the organiser's key"):
                await organiser.give(signed(1, PauseRun(), RunKeys.generate(), net.run_id))
            with pytest.raises(NotWelcome):
                await stranger.ask()
            assert (await organiser.ask()).next_number == 1

    kit.run(main())


def test_no_epoch_opens_in_a_paused_run_unless_an_order_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            clients = await net.started()
            coordinator, log = net.up.coordinator, net.up.coordinator.log
            pause = signed(1, PauseRun(), coordinator.keys, net.run_id)
            coordinator.give_order(pause)
            assert await net.publish(clients[0], control(net, log, pause), b"")
            assert coordinator.status().state == "paused"
            now_s = await stand_still(net, coordinator._steady(), 3 * STALL_S)
            assert log.head().epoch == 0
            coordinator.give_order(signed(2, ResumeRun(), coordinator.keys, net.run_id))
            await stand_still(net, now_s, 1.5 * STALL_S)
            assert log.head().epoch == 1
            assert log.settings.is_paused

    kit.run(main())


def test_an_order_that_a_lone_trainer_can_decide_opens_an_epoch(tmp_path: Path) -> None:
    """Without one it could not be told to go on alone: the other elector is gone."""

    async def main() -> None:
        async with kit.net(tmp_path) as net:
            clients = await net.started()
            coordinator, log = net.up.coordinator, net.up.coordinator.log
            for client, index in ((clients[1], 1), (clients[2], 2)):
                await client.heartbeat(net.swarm.status(index), leaving=True)
            now_s = await stand_still(net, coordinator._steady(), 3 * STALL_S, online=1)
            assert log.head().epoch == 0
            order = signed(1, SetMinPeers(value=1), coordinator.keys, net.run_id)
            coordinator.give_order(order)
            await stand_still(net, now_s, 3 * STALL_S, online=1)
            assert log.head().epoch > 0
            assert [e.peer_id for e in log.replica.electorate] == [net.swarm.identities[0].peer_id]

    kit.run(main())


def test_a_run_is_complete_when_it_is_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            clients = await net.started()
            coordinator, log = net.up.coordinator, net.up.coordinator.log
            stop = signed(1, StopRun(), coordinator.keys, net.run_id)
            coordinator.give_order(stop)
            assert await net.publish(clients[0], control(net, log, stop), b"")
            status = coordinator.status()
            assert (status.state, status.position, status.rounds_total) == ("finished", 1, 1)
            assert coordinator.finished.is_set()
            assert (await clients[0].heartbeat(net.swarm.status(0))).finished

    kit.run(main())


def test_an_evicted_peer_is_told_and_refused_until_it_is_readmitted(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        bad = swarm.identities[0]
        async with kit.net(tmp_path, swarm) as net:
            clients = await net.started()
            coordinator, keys = net.up.coordinator, net.up.coordinator.keys
            evict = EvictPeer(peer_id=bad.peer_id, reason="noise")
            coordinator.give_order(signed(1, evict, keys, net.run_id))
            with pytest.raises(Evicted, match="evicted this peer: noise; ask the organiser to"):
                await clients[0].heartbeat(swarm.status(0))
            with pytest.raises(Evicted, match="noise"):
                await net.client(0).join()
            await clients[1].heartbeat(swarm.status(1))
            assert clients[1].is_evicted(bad.peer_id)
            assert await net.publish(clients[1], _evicting(net, coordinator.log, 1, evict), b"")
            assert coordinator.status().evicted == [bad.peer_id]
            assert bad.peer_id[-6:] in orders_text(coordinator.status())
        async with kit.net(tmp_path, swarm) as net:  # kept over a restart, by the log alone
            assert net.up.coordinator.admission.is_evicted(bad.peer_id)
            with pytest.raises(Evicted):
                await net.client(0).join()
            readmit = ReadmitPeer(peer_id=bad.peer_id)
            net.up.coordinator.give_order(signed(2, readmit, keys, net.run_id))
            await net.client(0).join()
            other = net.client(1)
            await other.join()
            other.recall_evictions(clients[1].evictions)
            await other.heartbeat(swarm.status(1))
            assert not other.is_evicted(bad.peer_id)  # the newer list names nobody

    kit.run(main())


def _evicting(net: kit.Net, log: KeptLog, number: int, change: EvictPeer) -> Any:
    order = signed(number, change, net.up.coordinator.keys, net.run_id)
    left = tuple(e for e in log.replica.electorate if e.peer_id != change.peer_id)
    return control(net, log, order, electorate=left)


def test_a_peer_that_a_command_has_evicted_is_readmitted_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            await net.started()
            coordinator, bad = net.up.coordinator, net.swarm.identities[0].peer_id
            evict(tmp_path, bad, at_s=time.time(), reason="noise")
            await coordinator.tick()
            assert coordinator.admission.is_evicted(bad)
            order = signed(1, ReadmitPeer(peer_id=bad), coordinator.keys, net.run_id)
            coordinator.give_order(order)
            assert not coordinator.admission.is_evicted(bad)

    kit.run(main())


def test_what_evicts_nobody_new_is_told(path: Path) -> None:
    desk = desk_at(path)
    one = EvictPeer(peer_id=Identity.ephemeral().peer_id)
    desk.give(signed(1, one), NONE)
    with pytest.raises(OrderRefused, match="evicted already; `atoll run readmit` lets it"):
        desk.give(signed(2, one), NONE)
    full = [RunSettings(number=1, evicted=tuple(sorted(PEERS)))]
    with pytest.raises(OrderRefused, match="64 peers are evicted by orders"):
        desk.give(signed(2, EvictPeer(peer_id=Identity.ephemeral().peer_id)), full)
    assert desk.evicted(NONE) == {one.peer_id: ""}
    assert desk_at(path.with_name("none.json")).evicted(NONE) is None


async def stand_still(net: kit.Net, since_s: float, seconds: float, *, online: int = 3) -> float:
    """Let time pass with peers online that decide nothing; return when it ends."""
    log, presence = net.up.coordinator.log, net.up.coordinator.presence
    for later in range(0, int(seconds), 5):
        there = {"epoch": log.head().epoch, "position": log.head().position}
        for index in range(online):
            presence.report(net.swarm.status(index, **there), since_s + later, leaving=False)
        await log._look(since_s + later)
    return since_s + seconds


def control(net: kit.Net, log: KeptLog, order: bytes, **changes: Any) -> Any:
    """The next entry, which brings an order."""
    replica = log.replica
    before = replica.settings
    settings = before.after(replica.open_order(order, before.key), replica.position).stored
    empty = {"members": (), "parts": ()} | changes
    entry, _ = net.swarm.entry(
        replica.run_id, replica.head, kind="control", order=order, settings=settings, **empty
    )
    return entry
