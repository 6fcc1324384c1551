"""The orders that a coordinator takes, keeps and gives to peers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.orders import ORDERS_FILE, OrderDesk, OrderRefused, OrdersError, misfit
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.rpc.client_errors import Invalid, NotWelcome
from atoll.coordinator.rpc.orders import OrderClient
from atoll.coordinator.run.keys import RunKeys, verify_run_key
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.orders import (
    MAX_PENDING,
    Change,
    Order,
    PauseRun,
    ResumeRun,
    RunSettings,
    SetInnerSteps,
    SetMinPeers,
    SetOuterMomentum,
    SetOuterRate,
    StopRun,
    sign_order,
)
from support import kit

KEYS = RunKeys.generate()
RUN = b"r" * 32
NONE = [RunSettings()]


def signed(number: int, change: Change, keys: RunKeys = KEYS, run_id: bytes = RUN) -> bytes:
    return sign_order(Order(run_id=run_id, number=number, change=change), keys.sign)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ORDERS_FILE


def desk_at(path: Path) -> OrderDesk:
    verify = partial(verify_run_key, KEYS.run_public_key)
    return OrderDesk(path, run_id=RUN, spec=kit.SPEC, verify_run=verify)


def test_orders_are_kept_over_a_restart(path: Path) -> None:
    desk = desk_at(path)
    orders = [signed(1, PauseRun()), signed(2, ResumeRun())]
    for order in orders:
        desk.give(order, NONE)
    again = desk_at(path)
    assert again.lacking(0) == orders
    assert again.lacking(1) == orders[1:]
    assert again.next_number(NONE) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_order_that_is_given_again_is_taken_once(path: Path) -> None:
    """The answer may have been lost."""
    desk = desk_at(path)
    order = desk.give(signed(1, PauseRun()), NONE)
    assert order is not None and order.number == 1
    assert desk.give(signed(1, PauseRun()), NONE) is None
    assert len(desk.lacking(0)) == 1


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
    with pytest.raises(OrderRefused, match="signature of the run's key"):
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
        ("noloco", PauseRun(), "no log"),
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


def test_orders_without_the_key_or_the_token_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path) as net:
            from dataclasses import replace

            organiser = OrderClient(net.up.invite)
            stranger = OrderClient(replace(net.up.invite, token=bytes(16)))
            for client in (organiser, stranger):
                net.stack.push_async_callback(client.close)
            with pytest.raises(Invalid, match="signature of the run's key"):
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


async def stand_still(net: kit.Net, since_s: float, seconds: float) -> float:
    """Let time pass with all peers online that decide nothing; return when it ends."""
    log, presence = net.up.coordinator.log, net.up.coordinator.presence
    for later in range(0, int(seconds), 5):
        there = {"epoch": log.head().epoch, "position": log.head().position}
        for index in range(len(net.swarm.identities)):
            presence.report(net.swarm.status(index, **there), since_s + later, leaving=False)
        await log._look(since_s + later)
    return since_s + seconds


def control(net: kit.Net, log: KeptLog, order: bytes) -> Any:
    """The next entry, which brings an order."""
    replica = log.replica
    settings = replica.settings.after(replica.open_order(order), replica.position).stored
    empty = {"members": (), "parts": ()}
    entry, _ = net.swarm.entry(
        replica.run_id, replica.head, kind="control", order=order, settings=settings, **empty
    )
    return entry
