"""`atoll run`: pause, resume, stop or change a run, or evict a peer, by signed orders."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.evict import the_peer
from atoll.peer.cli.organiser_key import add_key, client_of, find_keys, key_in_force
from atoll.peer.cli.watching import add_invite, read_invite

if TYPE_CHECKING:
    from atoll.coordinator.rpc.orders import OrderClient, OrderStanding
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.status import RunStatus
    from atoll.optim.log.orders import Change, Order

T = TypeVar("T")

LOOK_EVERY_S = 0.5
BUSY_S = 20.0  # for which a call is made again: other programs may use up what the address has
WAIT_S = 60.0  # an order is decided within a round, or in a paused run within seconds
NAMES = (
    "inner_steps",
    "outer_lr",
    "outer_momentum",
    "inner_scale",
    "min_peers",
    "codec",
    "reducer",
)


class WrongOrder(ValueError):
    """The order is of a kind or a value that the run cannot take."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll run`."""
    parser = new_parser(
        subparsers,
        "run",
        description="Change a run that goes on. An order is signed with the run's key and decided\n"
        "in the log, so all peers switch at the same round; a peer that was away meets\n"
        "it there. The key is that of the coordinator's state directory on this\n"
        "machine, or of a copy of its keys.json.",
        examples="atoll run pause INVITE\n"
        "atoll run resume INVITE\n"
        "atoll run stop INVITE --after-round 500\n"
        "atoll run set INVITE inner_steps=200 outer_lr=0.5\n"
        "atoll run set INVITE inner_scale=0.5 --key backup/keys.json --json\n"
        'atoll run evict INVITE laptop-3 --reason "sends noise"\n'
        "atoll run readmit INVITE laptop-3",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(actions, "pause", "Decide no more rounds; peers keep their work and wait.")
    _add(actions, "resume", "Continue a paused run, or one that is to stop later.")
    stop = _add(actions, "stop", "End the run for good; its peers leave.")
    stop.add_argument(
        "--after-round",
        type=_round,
        metavar="N",
        help="Last round of the run (default: the next one).",
    )
    change = _add(actions, "set", f"Change settings of the run: {', '.join(NAMES)}.")
    change.add_argument(
        "changes",
        nargs="+",
        metavar="NAME=VALUE",
        help="inner_steps: steps of a window. outer_lr, outer_momentum: of the outer step. "
        "inner_scale: factor of the planned inner learning rate. min_peers: at 1 a trainer "
        "goes on alone. codec: of contributions and means, such as int4. "
        "reducer: rule by which contributions are reduced, such as median.",
    )
    evict = _add(actions, "evict", "Put a peer out of every round; it ends.")
    readmit = _add(actions, "readmit", "Let an evicted peer take part again.")
    for action in (evict, readmit):
        action.add_argument("peer", metavar="PEER", help="PeerID, its last letters, or its name.")
    evict.add_argument(
        "--reason", default="", metavar="TEXT", help="Reason for the peer and the log (optional)."
    )


def _add(actions: Subparsers, name: str, help_: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=help_, description=help_)
    add_invite(action)
    add_key(action)
    action.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"Longest wait for the decision (default: {WAIT_S:.0f}).",
    )
    action.add_argument("--json", action="store_true", help="Line of JSON for each order.")
    return action


def _round(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected the number of a round, got {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Give the orders, and wait until they are decided."""
    invite = read_invite(args.invite)
    find_keys(invite, args.key)  # before anything is asked
    if args.action in ("evict", "readmit"):
        return asyncio.run(_give_about(invite, args))
    return asyncio.run(_give(invite, args.key, changes_of(args), args.wait, as_json=args.json))


def changes_of(args: argparse.Namespace) -> list[Change]:
    """Return the changes that the arguments ask for. Raises WrongOrder."""
    from atoll.optim.log.orders import PauseRun, ResumeRun, StopRun

    if args.action == "set":
        return [_setting(each) for each in args.changes]
    if args.action == "stop":
        return [StopRun(after_round=args.after_round)]
    return [PauseRun() if args.action == "pause" else ResumeRun()]


def _setting(text: str) -> Change:
    from pydantic import ValidationError

    from atoll.optim.log.orders import NUMBERS, SetCodec, SetReducer
    from atoll.optim.reduction.robust import REDUCERS

    name, given, value = text.partition("=")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; expected {', '.join(NAMES)}"
        raise WrongOrder(f"unknown setting {name!r}{hint}")
    if name == "codec":
        try:
            return SetCodec(value=value)
        except ValidationError:
            raise WrongOrder(f"expected codec=NAME, such as codec=int4, got {text}") from None
    if name == "reducer":
        try:
            return SetReducer.model_validate({"value": value})
        except ValidationError:
            raise WrongOrder(f"expected reducer={'|'.join(REDUCERS)}, got {text}") from None
    try:
        number = float(value)
    except ValueError:
        raise WrongOrder(f"expected {name}=NUMBER, got {name}{given}{value}") from None
    is_whole = NUMBERS[name].model_fields["value"].annotation is int and number.is_integer()
    try:
        return NUMBERS[name].model_validate({"value": int(number) if is_whole else number})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "expected")
        raise WrongOrder(f"{name}: {reason}, got {value}") from None


async def _give_about(invite: Invite, args: argparse.Namespace) -> int:
    """Give an order about a peer, and warn if too few are left."""
    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.optim.log.orders import MAX_REASON, EvictPeer, ReadmitPeer

    client = client_of(StatusClient, invite)
    try:
        status = await patiently(client.status)
    finally:
        await client.close()
    peer_id = find_peer(status, args.peer)
    if args.action == "readmit":
        change: Change = ReadmitPeer(peer_id=peer_id)
        return await _give(invite, args.key, [change], args.wait, as_json=args.json)
    if len(args.reason) > MAX_REASON:
        raise WrongOrder(f"--reason: expected at most {MAX_REASON} characters")
    if warning := shortage(status, peer_id):
        print(f"warning: {warning}", file=sys.stderr)
    change = EvictPeer(peer_id=peer_id, reason=args.reason)
    return await _give(invite, args.key, [change], args.wait, as_json=args.json)


def find_peer(status: RunStatus, named: str) -> str:
    """Return the PeerID of a peer that the run knows. Raises UnknownPeer."""
    known = {peer.peer_id: peer.name for peer in status.peers}
    return the_peer({**dict.fromkeys(status.evicted, ""), **known}, named)


def shortage(status: RunStatus, peer_id: str) -> str:
    """Return what an eviction leaves too few of, with the remedy; empty if enough are left."""
    from atoll.coordinator.report.view import is_gone

    left = [p for p in status.peers if p.peer_id != peer_id and not is_gone(p)]
    trainers = sum(peer.role == "trainer" for peer in left)
    keepers = sum(peer.role == "keeper" for peer in left)
    if trainers < status.min_peers:
        return (
            f"{trainers} of {status.min_peers} trainers are left, so the run waits; invite others, "
            "or set min_peers"
        )
    if keepers < status.min_keepers:
        return f"{keepers} of {status.min_keepers} keepers are left; invite others"
    return ""


async def standing_of(invite: Invite) -> OrderStanding:
    """Return how far the organiser's orders are. Raises CoordinatorError."""
    from atoll.coordinator.rpc.orders import OrderClient

    client = client_of(OrderClient, invite)
    try:
        return await patiently(client.ask)
    finally:
        await client.close()


async def give_orders(
    invite: Invite, key: Path | None, changes: Sequence[Change], wait_s: float
) -> list[tuple[Order, bool]]:
    """Give orders, and wait until they are decided.

    Args:
        invite: of the run.
        key: file of the organiser's key, or its directory; None: found on this machine.
        changes: one for each order.
        wait_s: longest wait for the decision.

    Returns:
        Each order, and whether it is decided.

    Raises:
        NoRunKey, KeysError: the key in force is not here.
        WrongOrder: the run cannot take a change; none was given.
        CoordinatorError: no answer, or a refusal.
    """
    from atoll.coordinator.orders import misfit
    from atoll.coordinator.rpc.orders import OrderClient
    from atoll.optim.log.orders import Order, sign_order

    client = client_of(OrderClient, invite)
    try:
        standing = await patiently(client.ask)
        organiser = key_in_force(invite, key, standing.settings)
        for change in changes:  # all of them, before the first is given
            if reason := misfit(standing.spec, change, standing.settings):
                raise WrongOrder(reason)
        orders = []
        for number, change in enumerate(changes, standing.next_number):
            order = Order(run_id=invite.run_id, number=number, change=change)
            await patiently(partial(client.give, sign_order(order, organiser.sign)))
            orders.append(order)
        decided = await _await_decision(client, orders[-1], wait_s)
    finally:
        await client.close()
    return [(order, order.number <= decided) for order in orders]


async def _give(
    invite: Invite, key: Path | None, changes: Sequence[Change], wait_s: float, *, as_json: bool
) -> int:
    for order, is_decided in await give_orders(invite, key, changes, wait_s):
        _tell(order, is_decided=is_decided, as_json=as_json)
    return 0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call, again if others at this address have made too many. Raises CoordinatorError."""
    from atoll.coordinator.rpc.client_errors import Busy

    loop = asyncio.get_running_loop()
    until = loop.time() + BUSY_S
    while True:
        try:
            return await call()
        except Busy:
            if loop.time() >= until:
                raise
        await asyncio.sleep(LOOK_EVERY_S)


async def _await_decision(client: OrderClient, last: Order, wait_s: float) -> int:
    """Wait until an order is in all logs of the run; return the newest that is."""
    from atoll.coordinator.rpc.client_errors import CoordinatorError

    until, decided = time.monotonic() + wait_s, 0
    while True:
        with suppress(CoordinatorError):  # the order is given all the same
            decided = (await client.ask()).decided
        if decided >= last.number or time.monotonic() >= until:
            return decided
        await asyncio.sleep(LOOK_EVERY_S)


def _tell(order: Order, *, is_decided: bool, as_json: bool) -> None:
    from atoll.optim.log.orders import described

    if as_json:
        change = order.change.model_dump()
        print_json({"number": order.number, **change, "decided": is_decided})
        return
    text = f"{described(order)}{waits(is_decided=is_decided)}"
    print(text, file=sys.stdout if is_decided else sys.stderr, flush=True)


def waits(*, is_decided: bool) -> str:
    """Return what to add to the text of an order that is not decided yet."""
    return "" if is_decided else " (given; decided as soon as enough peers are online)"
