"""The organiser's orders: which were given, and which a log still lacks.

`atoll run` signs an order with the run's key; the coordinator checks it, keeps it, and gives it to
peers with its answers to heartbeats until it is in their log. So an order outlives a restart of the
coordinator, and whoever has the run's key may give one from any machine.

    orders.json    ["...", ...] signed orders in hex, the newest `KEPT` of them, 0600

Exceptions:

    ValueError
      OrdersError      the file is damaged
    Exception
      OrderRefused     the order is not this run's, or not its next one; the text is for people
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.compression.base import CodecError
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.log.entry import LogError
from atoll.optim.log.orders import (
    MAX_EVICTED,
    MAX_PENDING,
    Change,
    EvictPeer,
    Order,
    RunSettings,
    SetCodec,
    SetInnerSteps,
    SetMinPeers,
    SetOuterMomentum,
    SetOuterRate,
    SetReducer,
    SignedOrder,
    StopRun,
)
from atoll.optim.log.replica import Replay
from atoll.optim.log.store import sync_folder
from atoll.optim.methods.base import MethodError
from atoll.optim.state.layout import Layout

ORDERS_FILE = "orders.json"
AS_BEGUN = RunSettings()
KEPT = 256  # a log that goes back to an older epoch needs some again, 250 bytes each


class OrdersError(ValueError):
    """The file of orders is damaged."""


class OrderRefused(Exception):
    """The order cannot be taken."""


def misfit(spec: RunSpec, change: Change, settings: RunSettings = AS_BEGUN) -> str:
    """Return why a change does not fit a run with such settings, with the remedy; empty if not."""
    method = spec.method()
    if not method.logged:
        remedy = "; `atoll evict` removes a peer" if isinstance(change, EvictPeer) else ""
        return f"the method {method.name} has no log that could decide orders{remedy}"
    match change:
        case SetCodec(value=codec):
            return _codec_misfit(spec, codec)
        case SetReducer(value=reducer):
            return _change_misfit(spec, "round", "reducer", reducer)
        case EvictPeer(peer_id=peer) if peer in settings.evicted:
            return "the peer is evicted already; `atoll run readmit` lets it come back"
        case EvictPeer() if len(settings.evicted) >= MAX_EVICTED:
            return (
                f"{MAX_EVICTED} peers are evicted by orders, and a log names no more; readmit one, "
                "or use `atoll evict` on the coordinator's machine"
            )
        case SetInnerSteps() if method.every_step:
            return f"{method.name} communicates at every step, so its windows have 1 step"
        case SetInnerSteps(value=steps) if method.hidden_steps(steps) > steps:
            hidden = method.hidden_steps(steps)
            return f"a round is hidden behind {hidden} steps; set inner_steps to {hidden} or more"
        case SetOuterRate() if not hasattr(method, "lr"):
            return f"{method.name} takes the inner learning rate; set inner_scale instead"
        case SetOuterMomentum() if not hasattr(method, "momentum"):
            return f"{method.name} has no outer momentum"
        case SetMinPeers() if spec.topology.num_stages > 1:
            return "the stages of a pipeline go on with one peer each, whatever min_peers is"
        case StopRun(after_round=last) if last and 0 < spec.run.rounds <= last:
            return f"the run ends after round {spec.run.rounds} in any case"
    return ""


def _codec_misfit(spec: RunSpec, codec: str) -> str:
    """Return why a run cannot go on in another codec; empty if it can."""
    if reason := _change_misfit(spec, "compression", "codec", codec):
        return reason
    before, after = spec.method(), _changed_spec(spec, "compression", "codec", codec).method()
    if before.reduction != "mean" or after.reduction != "mean":
        return f"{before.name} with {after.codec.spec} reduces no mean; begin a run with it"
    if not (before.codec.elementwise and after.codec.elementwise):
        return f"{after.codec.spec} and {before.codec.spec} cut a model into other chunks; try int4"
    if before.residual != after.residual:
        return (
            f"error feedback is {before.residual:g} with {before.codec.spec} and "
            f"{after.residual:g} with {after.codec.spec}; choose a codec that keeps it"
        )
    try:
        Replay(after, Layout(names=("w",), shapes=((8, 8),)))
    except CodecError as error:
        return str(error)
    return ""


def _change_misfit(spec: RunSpec, section: str, name: str, value: str) -> str:
    """Return why a run whose rounds are reduced in one way cannot go on in another."""
    try:
        _changed_spec(spec, section, name, value).method()
    except (SpecError, CodecError, MethodError) as error:
        return str(error).splitlines()[-1].strip()
    method = spec.method()
    if getattr(method, "count", 1) > 1 or method.hidden_steps(spec.outer.inner_steps):
        return f"rounds of {method.name} overlap, so its {name} cannot change; begin a run with it"
    return ""


def _changed_spec(spec: RunSpec, section: str, name: str, value: str) -> RunSpec:
    plain = json.loads(spec.canonical())
    plain[section][name] = value
    return RunSpec.from_dict(plain)


class OrderDesk:
    """Takes orders for the coordinator, and keeps them."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: bytes,
        spec: RunSpec,
        verify_run: Callable[[bytes, bytes], bool],
    ) -> None:
        """Read the file. Raises OrdersError."""
        self._path = path
        self._run_id = run_id
        self._spec = spec
        self._verify_run = verify_run
        self._orders: dict[int, tuple[Order, bytes]] = {}
        """By number, in order."""
        for signed in _read(path):
            try:
                order = self._open(signed)
            except (LogError, OrderRefused) as error:
                raise OrdersError(
                    f"{path}: damaged ({error}); delete it: orders in the log stay in force"
                ) from None
            self._orders[order.number] = order, signed

    def _open(self, signed: bytes) -> Order:
        order = SignedOrder.decode(signed).open(self._verify_run)
        if order.run_id != self._run_id:
            raise OrderRefused("the order is of another run; pass the invite of this one")
        return order

    def next_number(self, logs: Sequence[RunSettings]) -> int:
        """Return the number of the next order, given the settings at the heads of all logs."""
        return max([*self._orders, *(each.number for each in logs)], default=0) + 1

    def settings(self, logs: Sequence[RunSettings], position: int) -> RunSettings:
        """Return what will be in force once all orders that were given are decided."""
        settings = max(logs, key=lambda each: each.number)
        for order, _ in self._row(settings.number):
            settings = settings.after(order, position)
        return settings

    def give(self, signed: bytes, logs: Sequence[RunSettings]) -> Order | None:
        """Take an order and keep it.

        Args:
            signed: it, as the run's key signed it.
            logs: the settings at the heads of the run's logs.

        Returns:
            The order; None if it was given before. Whoever has an entry that brings it can send it.

        Raises:
            OrderRefused: it is not the run's next order, does not fit the run, or too many wait.
            OSError: it cannot be kept.
        """
        try:
            order = self._open(signed)
        except LogError as error:
            raise OrderRefused(str(error)) from None
        due = self.next_number(logs)
        if order.number in self._orders and self._orders[order.number][1] == signed:
            return None  # asked once more, as the answer was lost
        if order.number != due:
            raise OrderRefused(f"expected order {due}, got order {order.number}; give it again")
        if reason := misfit(self._spec, order.change, self.settings(logs, 0)):
            raise OrderRefused(reason)
        if len(self.lacking(min(each.number for each in logs))) >= MAX_PENDING:
            raise OrderRefused(
                f"{MAX_PENDING} orders wait already; they are decided once peers are online"
            )
        orders = dict([*self._orders.items(), (order.number, (order, signed))][-KEPT:])
        _write(self._path, [each for _, each in orders.values()])
        self._orders = orders
        return order

    def evicted(self, logs: Sequence[RunSettings]) -> Mapping[str, str] | None:
        """Return why each peer is out once all orders are decided; None in a run without orders."""
        settings = self.settings(logs, 0)
        if not settings.number:
            return None
        changes = (order.change for order, _ in self._orders.values())
        reasons = {c.peer_id: c.reason for c in changes if isinstance(c, EvictPeer)}
        return {peer: reasons.get(peer, "") for peer in settings.evicted}

    def lacking(self, number: int) -> list[bytes]:
        """Return the orders that a log lacks whose newest one has this number."""
        return [signed for _, signed in self._row(number)]

    def _row(self, number: int) -> list[tuple[Order, bytes]]:
        row: list[tuple[Order, bytes]] = []
        while (found := self._orders.get(number + len(row) + 1)) and len(row) < MAX_PENDING:
            row.append(found)
        return row


def _read(path: Path) -> list[bytes]:
    try:
        return [bytes.fromhex(each) for each in json.loads(path.read_text(encoding="ascii"))]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        raise OrdersError(f"{path}: damaged; delete it: orders in the log stay in force") from None


def _write(path: Path, orders: Sequence[bytes]) -> None:
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump([each.hex() for each in orders], file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
