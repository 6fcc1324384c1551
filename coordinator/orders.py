"""The organiser's orders: which were given, and which a log still lacks.

`atoll run` signs an order with the organiser's key; the coordinator checks it, keeps it, and gives
it to peers with its answers to heartbeats until it is in their log. So an order outlives a restart
of the coordinator, and whoever has the organiser's key may give one from any machine.

    orders.json    ["ORDER" or "ORDER:KEY", ...] signed orders in hex, the newest `KEPT` of them,
                   and the public key that signed each, unless it is the run's; 0600

Exceptions:

    ValueError
      OrdersError      the file is damaged
    Exception
      OrderRefused     the order is not this run's, or not its next one; the text is for people
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.compression.base import CodecError
from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.log.entry import LogError, VerifyRun, verify_key
from atoll.optim.log.orders import (
    MAX_EVICTED,
    MAX_PENDING,
    Change,
    EvictPeer,
    Order,
    RotateKey,
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
from atoll.optim.log.replay import Replay
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
        case RotateKey(value=key) if key == settings.key:
            return "that is the organiser's key already; name a new one"
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


@dataclass(frozen=True, kw_only=True)
class GivenOrder:
    """An order that the organiser gave."""

    order: Order
    signed: bytes
    key: bytes | None
    """public key that signed it; None: the run's"""


class OrderDesk:
    """Takes orders for the coordinator, and keeps them."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: bytes,
        spec: RunSpec,
        verify_run: VerifyRun,
    ) -> None:
        """Read the file. Raises OrdersError."""
        self._path = path
        self._run_id = run_id
        self._spec = spec
        self._verify_run = verify_run
        self._orders: dict[int, GivenOrder] = {}
        """By number, in order."""
        for signed, key in _read(path):
            try:
                given = self._open(signed, key)
            except (LogError, OrderRefused) as error:
                raise OrdersError(
                    f"{path}: damaged ({error}); delete it: orders in the log stay in force"
                ) from None
            self._orders[given.order.number] = given

    def _open(self, signed: bytes, key: bytes | None) -> GivenOrder:
        order = SignedOrder.decode(signed).open(self._verify_run, key)
        if order.run_id != self._run_id:
            raise OrderRefused("the order is of another run; pass the invite of this one")
        return GivenOrder(order=order, signed=signed, key=key)

    def _rotations(self) -> list[GivenOrder]:
        return [each for each in self._orders.values() if isinstance(each.order.change, RotateKey)]

    def _expect_in_force(self, signed: SignedOrder, key: bytes | None) -> None:
        """Raise OrderRefused if a key signed an order that was in force before."""
        if signed.is_signed_by(self._verify_run, key):
            return
        by = (each for each in self._rotations() if signed.is_signed_by(self._verify_run, each.key))
        if (last := next(by, None)) is not None:
            raise OrderRefused(
                f"the key that signed this order counts no more: order {last.order.number} has "
                "replaced it; sign with the organiser's key in force (`--key`)"
            )

    def _expect_new_key(self, key: bytes, signed: bytes) -> None:
        """Raise OrderRefused if a key is the organiser's already, or was it before."""
        for each in (signed, *(rotation.signed for rotation in self._rotations())):
            if SignedOrder.decode(each).is_signed_by(self._verify_run, key):
                raise OrderRefused("that key was the organiser's before; name a new one")

    def _expect_room(self, order: Order, settings: RunSettings, oldest: RunSettings) -> None:
        """Raise OrderRefused if too many orders wait.

        An eviction counts at once. If it is the electors' that would have to decide it, nothing is
        decided until they are readmitted: so a place is left for the readmission of each peer that
        orders evict which wait.

        Args:
            order: the next one.
            settings: what is in force before it, once all that wait are decided.
            oldest: the settings at the head of the log that lacks most orders.
        """
        waiting = len(self.lacking(oldest))
        to_readmit = {*settings.after(order, 0).evicted} - {*oldest.evicted}
        if waiting + 1 + len(to_readmit) > MAX_PENDING:
            room = "; there is room to readmit the peers that they evict" if to_readmit else ""
            raise OrderRefused(
                f"{waiting} orders wait already; they are decided once peers are online{room}"
            )

    def verify_organiser(self, logs: Sequence[RunSettings]) -> VerifyRun:
        """Return what checks signatures of the organiser's key, after all orders so far."""
        key = self.settings(logs, 0).key
        return self._verify_run if key is None else partial(verify_key, key)

    def next_number(self, logs: Sequence[RunSettings]) -> int:
        """Return the number of the next order, given the settings at the heads of all logs."""
        return self.settings(logs, 0).number + 1

    def settings(self, logs: Sequence[RunSettings], position: int) -> RunSettings:
        """Return what will be in force once all orders that were given are decided."""
        settings = max(logs, key=lambda each: each.number)
        for given in self._row(settings):
            settings = settings.after(given.order, position)
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
        if any(each.signed == signed for each in self._orders.values()):
            return None  # asked once more, as the answer was lost
        settings = self.settings(logs, 0)
        try:
            self._expect_in_force(SignedOrder.decode(signed), settings.key)
            given = self._open(signed, settings.key)
        except LogError as error:
            raise OrderRefused(str(error)) from None
        order, due = given.order, settings.number + 1
        if order.number != due:
            raise OrderRefused(f"expected order {due}, got order {order.number}; give it again")
        if reason := misfit(self._spec, order.change, settings):
            raise OrderRefused(reason)
        if isinstance(order.change, RotateKey):
            self._expect_new_key(order.change.value, signed)
        self._expect_room(order, settings, min(logs, key=lambda each: each.number))
        earlier = {n: each for n, each in self._orders.items() if n < order.number}
        orders = dict([*earlier.items(), (order.number, given)][-KEPT:])
        _write(self._path, list(orders.values()))
        self._orders = orders
        return order

    def evicted(self, logs: Sequence[RunSettings]) -> Mapping[str, str] | None:
        """Return why each peer is out once all orders are decided; None in a run without orders."""
        settings = self.settings(logs, 0)
        if not settings.number:
            return None
        changes = (each.order.change for each in self._orders.values())
        reasons = {c.peer_id: c.reason for c in changes if isinstance(c, EvictPeer)}
        return {peer: reasons.get(peer, "") for peer in settings.evicted}

    def lacking(self, log: RunSettings) -> list[bytes]:
        """Return the orders that a log lacks, given the settings at its head."""
        return [each.signed for each in self._row(log)]

    def _row(self, log: RunSettings) -> list[GivenOrder]:
        """Return the orders that follow in a log, each signed by the key in force there.

        An order that was given before the coordinator knew of another key in the log is none.
        """
        row: list[GivenOrder] = []
        key = log.key
        while (found := self._orders.get(log.number + len(row) + 1)) and len(row) < MAX_PENDING:
            if found.key != key:
                break
            row.append(found)
            key = found.order.change.value if isinstance(found.order.change, RotateKey) else key
        return row


def _read(path: Path) -> list[tuple[bytes, bytes | None]]:
    """Return the signed orders in the file, each with the key that signed it; None: the run's."""
    try:
        rows = [each.partition(":") for each in json.loads(path.read_text(encoding="ascii"))]
        return [(bytes.fromhex(o), bytes.fromhex(key) if key else None) for o, _, key in rows]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, AttributeError):
        raise OrdersError(f"{path}: damaged; delete it: orders in the log stay in force") from None


def _write(path: Path, orders: Sequence[GivenOrder]) -> None:
    rows = [each.signed.hex() + (f":{each.key.hex()}" if each.key else "") for each in orders]
    replace_private(path, json.dumps(rows).encode("ascii"))
