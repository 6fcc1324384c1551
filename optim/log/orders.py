"""Orders: what the organiser changes of a run that goes on, decided in the log like an update.

An order is one change under the organiser's key. The log brings orders in control entries, each in
one, and the settings that follow from them hold from the next position on, for everybody.

    order    = sign("atoll order 1" | order record)      by the organiser's key
    number   = 1 for the first one of a run, then one more each time

The organiser's key is the run's, until an order names another one. The order that does is signed by
the key of before, all later ones by the new one: the settings before an entry say which key signs
its order, so a replay needs nothing but the log.

The number makes an order count once: a copy of an older one follows nothing. Settings are a pure
function of the orders in a log. Each entry carries those after it, and an epoch record those at its
base, as both carry the norms: so a replica that begins at a snapshot needs no older entry.

    order       settings after it
    pause       no update may follow until a resume
    resume      updates may follow, and no end is set
    stop        the run ends after a round, or with this entry
    set         one of the numbers in `NUMBERS`, the codec or the reducer is another one
    evict       a peer is in no electorate and no round
    readmit     it may be in both again
    key         later orders are signed by another key

A run of several logs has one row of orders; each log takes all of them, at positions of its own.

Exceptions:

    LogError
      OrderInvalid     not signed by the key in force, of another run, or not the one that comes
                       next
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer

from atoll.optim.log.entry import (
    Count,
    Digest,
    Entry,
    LogError,
    Record,
    Signature,
    VerifyRun,
    fp32,
    verify_key,
)
from atoll.optim.reducer import Course
from atoll.optim.reduction.robust import ReducerName

MAX_PENDING = 16  # orders that wait to be decided; a position takes one
MAX_EVICTED = 64  # peers that settings name, 54 bytes each in every entry
MAX_REASON = 200  # characters
MAX_INNER_STEPS = 1_000_000  # of a window: days at a second a step

LATER_FIELDS = ("evicted", "codec", "reducer", "key")  # left out of settings while not set

OpenOrder = Callable[[bytes, bytes | None], "Order"]
"""Returns the order in a signed one, given the key that orders have named; None: the run's. Raises
LogError: it is none of this run's."""


class OrderInvalid(LogError):
    """An order that the key in force did not sign, or that does not come next."""


InnerSteps = Annotated[int, Field(ge=1, le=MAX_INNER_STEPS)]
OuterRate = Annotated[FiniteFloat, Field(gt=0, le=100)]
Momentum = Annotated[FiniteFloat, Field(ge=0, lt=1)]
Scale = Annotated[FiniteFloat, Field(gt=0, le=100)]
MinPeers = Annotated[int, Field(ge=1, le=4096)]
CodecName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9(),.=_+:*/-]{1,64}$")]
PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{46,59}$")]


class PauseRun(Record):
    """Decide no more updates."""

    kind: Literal["pause"] = "pause"


class ResumeRun(Record):
    """Continue: neither paused nor about to stop."""

    kind: Literal["resume"] = "resume"


class StopRun(Record):
    """End the run."""

    kind: Literal["stop"] = "stop"
    after_round: Count | None = None
    """the last round; None: the one that this order takes"""


class SetInnerSteps(Record):
    """Let windows have so many inner steps."""

    kind: Literal["inner_steps"] = "inner_steps"
    value: InnerSteps


class SetOuterRate(Record):
    """Let the outer step have this learning rate."""

    kind: Literal["outer_lr"] = "outer_lr"
    value: OuterRate


class SetOuterMomentum(Record):
    """Let the outer step have this momentum."""

    kind: Literal["outer_momentum"] = "outer_momentum"
    value: Momentum


class SetInnerScale(Record):
    """Multiply the inner learning rate of the run's schedule by this."""

    kind: Literal["inner_scale"] = "inner_scale"
    value: Scale


class SetMinPeers(Record):
    """Let a trainer wait for others, or not, as if the run had begun with so many."""

    kind: Literal["min_peers"] = "min_peers"
    value: MinPeers


class SetCodec(Record):
    """Let contributions and means be encoded in this codec."""

    kind: Literal["codec"] = "codec"
    value: CodecName


class SetReducer(Record):
    """Let owners reduce chunks by this rule."""

    kind: Literal["reducer"] = "reducer"
    value: ReducerName


class EvictPeer(Record):
    """Put a peer out of every electorate and round."""

    kind: Literal["evict"] = "evict"
    peer_id: PeerId
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""


class ReadmitPeer(Record):
    """Let an evicted peer take part again."""

    kind: Literal["readmit"] = "readmit"
    peer_id: PeerId


class RotateKey(Record):
    """Let another key sign all later orders."""

    kind: Literal["key"] = "key"
    value: Digest
    """its Ed25519 public key"""


SetNumber = SetInnerSteps | SetOuterRate | SetOuterMomentum | SetInnerScale | SetMinPeers
Change = Annotated[
    PauseRun
    | ResumeRun
    | StopRun
    | SetNumber
    | SetCodec
    | SetReducer
    | EvictPeer
    | ReadmitPeer
    | RotateKey,
    Field(discriminator="kind"),
]

NUMBERS: dict[str, type[SetNumber]] = {
    kind.model_fields["kind"].default: kind
    for kind in (SetInnerSteps, SetOuterRate, SetOuterMomentum, SetInnerScale, SetMinPeers)
}
"""The numbers that can be set, by name."""


class Order(Record):
    """One change of a run."""

    run_id: Digest
    """the run's, also where a log of several takes it"""
    number: Annotated[Count, Field(ge=1)]
    change: Change


class SignedOrder(Record):
    """An order under the signature of the organiser's key."""

    order: bytes
    signature: Signature

    def open(self, verify_run: VerifyRun, key: bytes | None) -> Order:
        """Return the order if the organiser's key signed it.

        Args:
            verify_run: checks a signature of the run's key.
            key: the public key that orders have named; None: the run's.

        Raises:
            OrderInvalid: another key signed it.
        """
        if not self.is_signed_by(verify_run, key):
            raise OrderInvalid("order: expected a signature of the organiser's key, got another")
        return Order.decode(self.order)

    def is_signed_by(self, verify_run: VerifyRun, key: bytes | None) -> bool:
        """Return whether a key signed the order; see `open`."""
        payload = order_payload(self.order)
        if key is None:
            return verify_run(payload, self.signature)
        return verify_key(key, payload, self.signature)


def read_order(signed: bytes) -> Order:
    """Return the order in a signed one without a look at the signature, which was checked before.

    Raises:
        MalformedRecord: the bytes are none.
    """
    return Order.decode(SignedOrder.decode(signed).order)


def order_payload(order: bytes) -> bytes:
    """Return what the organiser's key signs to give an order."""
    return b"atoll order 1" + order


def sign_order(order: Order, sign: Callable[[bytes], bytes]) -> bytes:
    """Return an order under the signature of the organiser's key, as entries carry it."""
    record = order.encode()
    return SignedOrder(order=record, signature=sign(order_payload(record))).encode()


class RunSettings(Record):
    """Hold what orders up to a position have changed; None stands for what the spec says."""

    number: Count = 0
    """of the newest order"""
    is_paused: bool = False
    last_round: Count | None = None
    inner_steps: InnerSteps | None = None
    outer_lr: FiniteFloat | None = None
    outer_momentum: FiniteFloat | None = None
    inner_scale: FiniteFloat | None = None
    min_peers: MinPeers | None = None
    evicted: Annotated[tuple[PeerId, ...], Field(max_length=MAX_EVICTED)] = ()
    """PeerIDs, sorted"""
    codec: CodecName | None = None
    reducer: ReducerName | None = None
    key: Digest | None = None
    """public key of the organiser; None: the run's"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what came later and is not set: settings of before keep their bytes."""
        return {k: v for k, v in handler(self).items() if v or k not in LATER_FIELDS}

    @property
    def stored(self) -> bytes:
        """Return the record as entries carry it: empty before the first order."""
        return self.encode() if self.number else b""

    @property
    def numbers(self) -> dict[str, float]:
        """Return the numbers that orders have set, by name."""
        found = {name: getattr(self, name) for name in (*NUMBERS, "last_round")}
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def course(self) -> Course:
        """Return what a trainer needs to know."""
        return Course(
            inner_steps=self.inner_steps,
            inner_scale=1.0 if self.inner_scale is None else self.inner_scale,
            last_round=self.last_round,
            is_paused=self.is_paused,
            codec=self.codec,
        )

    def is_over(self, position: int) -> bool:
        """Return whether the run has ended before a position."""
        return self.last_round is not None and position >= self.last_round

    def takes_updates(self, position: int) -> bool:
        """Return whether updates and NULLs may be decided at a position."""
        return not self.is_paused and not self.is_over(position)

    def after(self, order: Order, position: int) -> Self:
        """Return the settings after the order that the entry at a position brings.

        Raises:
            OrderInvalid: it is not the one that comes next.
        """
        if order.number != self.number + 1:
            raise OrderInvalid(f"expected order {self.number + 1}, got order {order.number}")
        changed = {"number": order.number, **self._changed(order.change, position)}
        return self.model_copy(update=changed)

    def _changed(self, change: Change, position: int) -> Mapping[str, Any]:
        match change:
            case PauseRun():
                return {"is_paused": True}
            case ResumeRun():
                return {"is_paused": False, "last_round": None}
            case StopRun():
                here = position + 1
                last = here if change.after_round is None else max(here, change.after_round)
                # A run that stops with this entry has nothing left to wait for.
                return {"last_round": last} | ({"is_paused": False} if last == here else {})
            case EvictPeer(peer_id=peer):
                evicted = {*self.evicted, peer}
                if len(evicted) > MAX_EVICTED:
                    raise OrderInvalid(f"expected at most {MAX_EVICTED} evicted peers")
                return {"evicted": tuple(sorted(evicted))}
            case ReadmitPeer(peer_id=peer):
                return {"evicted": tuple(each for each in self.evicted if each != peer)}
            case _:
                return {change.kind: change.value}

    def scalars(self, lr: float, momentum: float) -> tuple[float, float]:
        """Return learning rate and momentum of the outer step, given the spec's, as fp32 values."""
        return (
            fp32(lr if self.outer_lr is None else self.outer_lr),
            fp32(momentum if self.outer_momentum is None else self.outer_momentum),
        )


@lru_cache(maxsize=64)
def read_settings(stored: bytes) -> RunSettings:
    """Return the settings that an entry or an epoch record carries.

    Raises:
        MalformedRecord: the bytes are none.
    """
    return RunSettings.decode(stored) if stored else RunSettings()


def settings_after(entry: Entry, before: bytes, open_order: OpenOrder) -> bytes:
    """Return the settings that an entry has to carry.

    Args:
        entry: the one that comes next.
        before: the settings before it, as they are stored.
        open_order: of this run.

    Raises:
        LogError: its order is not the one that comes next, or the run is paused or has ended.
    """
    settings = read_settings(before)
    if settings.is_over(entry.position):
        raise OrderInvalid(
            f"entry {entry.position}: expected none, as the run ended after round "
            f"{settings.last_round}"
        )
    if entry.kind == "control":
        return settings.after(open_order(entry.order, settings.key), entry.position).stored
    if settings.is_paused:
        raise OrderInvalid(f"entry {entry.position}: expected an order, as the run is paused")
    if out := settings.evicted and {m.peer_id for m in entry.members} & {*settings.evicted}:
        raise OrderInvalid(f"entry {entry.position}: {min(out)} is a member, but was evicted")
    return before


def check_settings(entry: Entry, before: bytes | None, open_order: OpenOrder) -> None:
    """Check that an entry carries the settings that follow from those before it.

    If those are not known, chain and certificate alone prove it: others have checked it before.

    Raises:
        LogError: it does not, or its order is not the one that comes next.
    """
    if before is not None and entry.settings != settings_after(entry, before, open_order):
        raise OrderInvalid(f"entry {entry.position}: expected the settings that follow")


def described(order: Order) -> str:
    """Return what an order does, for people."""
    match order.change:
        case PauseRun():
            return f"order {order.number}: the run is paused"
        case ResumeRun():
            return f"order {order.number}: the run continues"
        case StopRun(after_round=None):
            return f"order {order.number}: the run ends here"
        case StopRun(after_round=last):
            return f"order {order.number}: the run ends after round {last}"
        case EvictPeer(peer_id=peer, reason=reason):
            why = f": {reason}" if reason else ""
            return f"order {order.number}: {_short(peer)} is evicted{why}"
        case ReadmitPeer(peer_id=peer):
            return f"order {order.number}: {_short(peer)} may take part again"
        case RotateKey(value=key):
            return f"order {order.number}: the organiser's key is {key.hex()[:16]} from here on"
        case SetReducer(value=reducer):
            return f"order {order.number}: the reducer is {reducer} from here on"
        case SetCodec(value=codec):
            return f"order {order.number}: the codec is {codec} from here on"
        case change:
            return f"order {order.number}: {change.kind} is {change.value:g} from here on"


def _short(peer_id: str) -> str:
    return peer_id[-8:]


class OrderBook:
    """Orders that a process knows and that may not be in its log yet; each checked when it came."""

    def __init__(self) -> None:
        self._orders: dict[int, bytes] = {}

    def add(self, signed: bytes, order: Order) -> bool:
        """Keep an order; return whether it is new. Of two of one number the newer one counts."""
        if self._orders.get(order.number) == signed:
            return False
        self._orders[order.number] = signed
        return True

    def after(self, number: int) -> list[bytes]:
        """Return the orders that follow one of this number, in a row; older ones are dropped."""
        self._orders = {n: each for n, each in self._orders.items() if n > number}
        row = []
        while (number := number + 1) in self._orders:
            row.append(self._orders[number])
        return row[:MAX_PENDING]

    def next(self, number: int) -> bytes | None:
        """Return the order that follows one of this number, if it is known."""
        return next(iter(self.after(number)), None)

    def drop(self, number: int) -> None:
        """Forget the order of this number."""
        self._orders.pop(number, None)

    def key_before(self, number: int, settings: RunSettings) -> bytes | None:
        """Return the key that signs the order of a number, as far as the orders here tell.

        `settings` are those of the log. The result is None for the run's key.
        """
        between = sorted(n for n in self._orders if settings.number < n < number)
        changes = (read_order(self._orders[n]).change for n in between)
        named = [change.value for change in changes if isinstance(change, RotateKey)]
        return named[-1] if named else settings.key
