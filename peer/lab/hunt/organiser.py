"""The organiser of a simulated run: orders, given to the coordinator whenever it can be reached.

Orders also reach peers in wrong ways: under another key, again, or with the number of another one,
as after a restore of the coordinator. `order_audits` holds what must come of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.coordinator.orders import misfit
from atoll.coordinator.rpc.client_errors import CoordinatorError, Invalid
from atoll.coordinator.rpc.orders import OrderClient
from atoll.coordinator.run.keys import RunKeys
from atoll.dht.identity import Identity
from atoll.optim.log.entry import Entry, LogError
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.orders import (
    Change,
    Order,
    PauseRun,
    RotateKey,
    RunSettings,
    SetCodec,
    SetInnerScale,
    SetInnerSteps,
    SetMinPeers,
    SetOuterMomentum,
    SetOuterRate,
    SetReducer,
    SignedOrder,
    StopRun,
    sign_order,
)
from atoll.peer.lab.hunt.machines import Machine, PeerMachine
from atoll.peer.lab.hunt.plans import PlannedFault

World = Any
"""A `world.World`, whose module imports this one."""

TRY_AGAIN_S = 5.0  # after the coordinator could not be reached
NEW_KEYS = 0.15  # of changes
MOST_ROUNDS = 20  # that a run goes on at most after an order to stop


class Organiser(Machine):
    """The machine from which orders are given, one after the other."""

    def __init__(
        self, world: World, keys: RunKeys, identity: Identity, faults: Sequence[PlannedFault]
    ) -> None:
        """Begin with a run's keys, and those that its faults draw.

        `identity` is another key, which signs what is forged.
        """
        self._signers = {None: keys.sign} | {
            key.public_key().public_bytes_raw(): key.sign for key in map(drawn_key, faults)
        }
        """By the key that orders have named: what signs with it."""
        self._wanted: asyncio.Queue[Change] = asyncio.Queue()
        self.given: list[tuple[int, bytes]] = []
        """the orders that the coordinator has taken, with their numbers"""
        self.signed: list[bytes] = []
        """all that the run's key has signed"""
        self._key_of: dict[bytes, bytes | None] = {}
        """the organiser's key that signed each order; None: the run's"""
        self.rivals: set[int] = set()
        """numbers of orders that a peer alone was given"""
        self.forgotten: set[int] = set()
        """numbers of orders that were lost with the coordinator before they were decided"""
        self.is_idle = True
        super().__init__(world, "organiser", identity)

    @property
    def wire_name(self) -> str:
        return "organiser"

    def _after_crash(self) -> None:
        pass

    def roots(self) -> Sequence[tuple[str, object]]:
        return ()

    async def _main(self) -> None:
        while True:
            change = await self._wanted.get()
            await self._give(change)
            self.is_idle = self._wanted.empty()

    # Orders

    def want(self, change: Change) -> None:
        """Give an order, when those before it are given and the coordinator can be reached."""
        self.is_idle = False
        self._wanted.put_nowait(change)

    async def _give(self, change: Change) -> None:
        """Give an order until the coordinator takes it, or says why not."""
        signed = b""
        while self.world.invite is None:  # the coordinator has not started yet
            await asyncio.sleep(TRY_AGAIN_S)
        while True:
            address = self.world.coordinator.address
            client = OrderClient(replace(self.world.invite, addresses=(address,)))
            try:
                if not signed:
                    standing = await client.ask()
                    if reason := misfit(standing.spec, change):
                        self.world.say(f"organiser: no order: {reason}")
                        return
                    signed = self._sign(standing.next_number, change, standing.settings.key)
                await client.give(signed)
                order = Order.decode(SignedOrder.decode(signed).order)
                self.given.append((order.number, signed))
                self.world.say(f"organiser: gave {order.number}: {change}")
                return
            except Invalid as error:
                if signed:  # its number is the next one's: it must not be repeated to anybody
                    self.signed.remove(signed)
                self.world.say(f"organiser: {change} was refused: {error}")
                return
            except CoordinatorError:
                await asyncio.sleep(TRY_AGAIN_S)
            finally:
                await client.close()

    def _sign(self, number: int, change: Change, key: bytes | None) -> bytes:
        order = Order(run_id=self.world.invite.run_id, number=number, change=change)
        signed = sign_order(order, self._signers[key])
        self.signed.append(signed)
        self._key_of[signed] = key
        return signed

    # Wrong ones

    def forge(self, change: Change, peer: PeerMachine) -> None:
        """Give a peer the next order under another key, as a liar does."""
        number = _settings(peer).number + 1
        order = Order(run_id=self.world.invite.run_id, number=number, change=change)
        if _takes(peer, sign_order(order, self.identity.sign)):
            self.world.audit.fail("orders are the organiser's", f"{peer.name} took a forged one")

    def repeat(self, peer: PeerMachine, chance: random.Random) -> None:
        """Give a peer all orders again, in any order."""
        for signed in chance.sample(self.signed, len(self.signed)):
            _takes(peer, signed)

    def rival(self, change: Change, peer: PeerMachine) -> None:
        """Give a peer an order whose number the coordinator's next one will have too."""
        settings = _settings(peer)
        self.rivals.add(settings.number + 1)
        _takes(peer, self._sign(settings.number + 1, change, settings.key))

    def lost(self, decided: Collection[bytes]) -> list[int]:
        """Return the numbers of orders that the coordinator took and a log does not hold.

        An order is void if its key is not the organiser's any more where its number comes, or not
        yet: a rival has named another, or the coordinator was lost with the order that named it.
        """
        return [
            number
            for number, signed in self.given
            if signed not in decided
            and number not in self.rivals | self.forgotten
            and self._key_of[signed] == _key_at(number, decided)
        ]

    def forget(self, decided: Collection[bytes]) -> None:
        """Note that the coordinator is lost, with the orders that no log holds.

        Those too whose key is not in force: the one that names it may still be decided.
        """
        self.forgotten.update(number for number, each in self.given if each not in decided)


def orders_of(replicas: Sequence[LiveReplica]) -> set[bytes]:
    """Return the orders that logs hold."""
    records = [record for each in replicas for record in each.store.headers(0, 1 << 30)]
    return {Entry.decode(record.entry).order for record in records} - {b""}


def _key_at(number: int, decided: Collection[bytes]) -> bytes | None:
    """Return the key that must sign an order, by those that a log holds."""
    orders = (Order.decode(SignedOrder.decode(each).order) for each in decided)
    keys = {o.number: o.change.value for o in orders if isinstance(o.change, RotateKey)}
    before = [named for named in keys if named < number]
    return keys[max(before)] if before else None


def _settings(peer: PeerMachine) -> RunSettings:
    replica = getattr(peer.peer.run, "replica", None) if peer.peer is not None else None
    return replica.settings if replica is not None else RunSettings()


def _takes(peer: PeerMachine, signed: bytes) -> bool:
    """Bring an order to a peer, as the answer to a heartbeat does."""
    rounds = getattr(peer.peer.run, "rounds", None) if peer.peer is not None else None
    if rounds is None:
        return False
    try:
        peer.do(lambda: rounds.ordering.take(signed))
    except LogError:
        return False
    return True


def drawn_change(fault: PlannedFault, position: int) -> Change:
    """Return the change that a fault stands for, at a position of the log."""
    match fault.kind:
        case "pause":
            return PauseRun()
        case "stop":
            last = position + 1 + fault.other % MOST_ROUNDS
            return StopRun(after_round=None if fault.who % 4 == 0 else last)
        case _:
            return _drawn_number(fault)


def drawn_key(fault: PlannedFault) -> Ed25519PrivateKey:
    """Return the organiser's new key that a fault draws."""
    drawn = f"organiser {fault.at_s} {fault.who} {fault.other}"
    return Ed25519PrivateKey.from_private_bytes(sha256(drawn.encode()).digest())


def _drawn_number(fault: PlannedFault) -> Change:
    if fault.amount < NEW_KEYS:
        return RotateKey(value=drawn_key(fault).public_key().public_bytes_raw())
    numbers: tuple[Callable[[], Change], ...] = (
        lambda: SetInnerSteps(value=2 + int(8 * fault.amount)),
        lambda: SetOuterRate(value=0.3 + 0.7 * fault.amount),
        lambda: SetOuterMomentum(value=0.9 * fault.amount),
        lambda: SetInnerScale(value=0.5 + fault.amount),
        lambda: SetMinPeers(value=1 + fault.who % 2),
        lambda: SetReducer(value=("mean", "median", "trimmed-mean")[fault.who % 3]),
        lambda: SetCodec(value=("int8", "int4", "fp16", "fp32")[fault.who % 4]),
    )
    return numbers[fault.other % len(numbers)]()
