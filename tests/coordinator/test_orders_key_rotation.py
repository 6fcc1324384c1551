"""Another key of the organiser's: what the coordinator takes of it, keeps and gives to peers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from atoll.coordinator.orders import ORDERS_FILE, OrderDesk, OrderRefused, OrdersError
from atoll.coordinator.rpc.client_errors import Invalid, NotWelcome
from atoll.coordinator.rpc.invites import InvitesClient
from atoll.coordinator.rpc.orders import OrderClient
from atoll.coordinator.run.keys import (
    KEYS_FILE,
    KeysError,
    OrganiserKey,
    RunKeys,
    organiser_keys,
)
from atoll.optim.log.entry import verify_key
from atoll.optim.log.orders import (
    Change,
    Order,
    PauseRun,
    ResumeRun,
    RotateKey,
    RunSettings,
    sign_order,
)
from support import kit

FIRST, SECOND, THIRD = (RunKeys.generate() for _ in range(3))
RUN = b"r" * 32
NONE = [RunSettings()]
TO_SECOND = RotateKey(value=SECOND.run_public_key)
TO_THIRD = RotateKey(value=THIRD.run_public_key)


def signed(number: int, change: Change, keys: RunKeys, run_id: bytes = RUN) -> bytes:
    return sign_order(Order(run_id=run_id, number=number, change=change), keys.sign)


def desk_at(path: Path) -> OrderDesk:
    verify = partial(verify_key, FIRST.run_public_key)
    return OrderDesk(path, run_id=RUN, spec=kit.SPEC, verify_run=verify)


def test_after_a_rotation_the_desk_takes_orders_of_the_new_key_alone(tmp_path: Path) -> None:
    desk = desk_at(tmp_path / ORDERS_FILE)
    desk.give(signed(1, TO_SECOND, FIRST), NONE)
    with pytest.raises(OrderRefused, match="counts no more: order 1 has replaced it"):
        desk.give(signed(2, PauseRun(), FIRST), NONE)
    with pytest.raises(OrderRefused, match="signature of the organiser's key"):
        desk.give(signed(2, PauseRun(), THIRD), NONE)
    orders = [signed(1, TO_SECOND, FIRST), signed(2, PauseRun(), SECOND)]
    desk.give(orders[1], NONE)
    assert desk.give(orders[0], NONE) is None  # once more, as the answer was lost
    again = desk_at(tmp_path / ORDERS_FILE)
    assert again.lacking(RunSettings()) == orders
    again.give(signed(3, TO_THIRD, SECOND), NONE)
    with pytest.raises(OrderRefused, match="order 3 has replaced it"):
        again.give(signed(4, ResumeRun(), SECOND), NONE)
    with pytest.raises(OrderRefused, match="order 1 has replaced it"):
        again.give(signed(4, ResumeRun(), FIRST), NONE)
    assert desk_at(tmp_path / ORDERS_FILE).settings(NONE, 0).key == THIRD.run_public_key


def test_no_key_comes_back(tmp_path: Path) -> None:
    desk = desk_at(tmp_path / ORDERS_FILE)
    same = RotateKey(value=FIRST.run_public_key)
    with pytest.raises(OrderRefused, match="was the organiser's before"):
        desk.give(signed(1, same, FIRST), NONE)
    desk.give(signed(1, TO_SECOND, FIRST), NONE)
    with pytest.raises(OrderRefused, match="organiser's key already"):
        desk.give(signed(2, TO_SECOND, SECOND), NONE)
    with pytest.raises(OrderRefused, match="was the organiser's before"):
        desk.give(signed(2, same, SECOND), NONE)


def test_an_order_of_a_key_that_the_log_has_replaced_is_given_to_nobody(tmp_path: Path) -> None:
    """A restored coordinator took it before it heard what the peers had decided."""
    path = tmp_path / ORDERS_FILE
    desk = desk_at(path)
    for number in (1, 2):
        desk.give(signed(number, PauseRun(), FIRST), NONE)
    ahead = RunSettings(number=1, key=SECOND.run_public_key)
    for each in (desk, desk_at(path)):
        assert each.lacking(ahead) == []
        assert each.next_number([ahead]) == 2  # no order that cannot be decided blocks the row
    desk.give(signed(2, ResumeRun(), SECOND), [ahead])
    assert desk_at(path).lacking(ahead) == [signed(2, ResumeRun(), SECOND)]


def test_a_flipped_key_in_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / ORDERS_FILE
    desk = desk_at(path)
    desk.give(signed(1, TO_SECOND, FIRST), NONE)
    desk.give(signed(2, PauseRun(), SECOND), NONE)
    text = path.read_text()
    path.write_text(
        text.replace(SECOND.run_public_key.hex() + '"', THIRD.run_public_key.hex() + '"')
    )
    with pytest.raises(OrdersError, match="delete it"):
        desk_at(path)


def test_a_running_coordinator_changes_keys_and_a_restart_remembers(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clients = await net.started()
            organiser, log = OrderClient(net.up.invite), net.up.coordinator.log
            invites = InvitesClient(net.up.invite)
            for each in (organiser, invites):
                net.stack.push_async_callback(each.close)
            first = net.up.coordinator.keys
            order = signed(1, TO_SECOND, first, net.run_id)
            given = await organiser.give(order)
            assert given.settings.key == SECOND.run_public_key and given.decided == 0
            beat = await clients[0].heartbeat(net.swarm.status(0))
            assert beat.orders == (order,)
            entry, _ = net.swarm.entry(
                log.replica.run_id,
                log.replica.head,
                kind="control",
                order=order,
                members=(),
                parts=(),
                settings=RunSettings(number=1, key=SECOND.run_public_key).stored,
            )
            assert await net.publish(clients[0], entry, b"")
            assert (await organiser.ask()).decided == 1
            with pytest.raises(Invalid, match="order 1 has replaced it"):
                await organiser.give(signed(2, PauseRun(), first, net.run_id))
            with pytest.raises(NotWelcome, match="organiser's key"):
                await invites.manage(first.sign)
            assert len(await invites.manage(SECOND.sign)) == 1
            texts = [event.text for event in net.up.coordinator.status().events]
            assert any("the organiser's key is " in text for text in texts)
        async with kit.net(tmp_path / "run", net.swarm) as net:
            organiser = OrderClient(net.up.invite)
            net.stack.push_async_callback(organiser.close)
            assert (await organiser.ask()).settings.key == SECOND.run_public_key
            await organiser.give(signed(2, PauseRun(), SECOND, net.run_id))

    kit.run(main())


def test_the_files_of_keys_are_found_by_run(tmp_path: Path) -> None:
    keys = RunKeys.load_or_create(tmp_path / KEYS_FILE)
    mine, other = OrganiserKey.create(tmp_path, RUN), OrganiserKey.create(tmp_path, b"s" * 32)
    assert mine.path.stat().st_mode & 0o777 == 0o600
    found = organiser_keys(tmp_path, keys.run_public_key, RUN)
    assert [key.public for key in found] == [mine.public, keys.run_public_key]
    assert organiser_keys(other.path, keys.run_public_key, RUN) == []
    assert organiser_keys(tmp_path / KEYS_FILE, b"x" * 32, RUN) == []
    for text in ("", "[]", "7", '{"version": 1}', '{"key": "zz", "run_id": ""}'):
        mine.path.write_text(text)
        with pytest.raises(KeysError, match="damaged"):
            organiser_keys(tmp_path, keys.run_public_key, RUN)
