"""The state of a run and its peers: plain records that travel as JSON.

Peers send `PeerStatus`, `Event` and `RoundReport` with their heartbeats; the coordinator answers
anyone who asks with a `RunStatus`. The dashboard reads nothing else.

Every record is a frozen, keyword-only dataclass of plain values. `to_json` returns compact UTF-8
bytes; `from_json` validates untrusted bytes: their length before parsing, then names, types,
ranges, lengths of texts and lists, and finite numbers. Unknown keys are refused, so that a newer
peer is noticed instead of half understood.

Exceptions:

    ValueError
      StatusError     the bytes are no valid record; names the field and what was expected
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import (
    MAX_CHARS,
    MAX_FIELDS,
    MAX_ITEMS,
    MAX_TEXT,
    MAX_VALUE_CHARS,
    Notice,
    size_of,
)
from atoll.coordinator.run.outcome import Outcome

MAX_RECORD_BYTES = 64 * 1024  # one peer's status or one round; a peer's is below 2 kB
MAX_RUN_BYTES = 16 * 1024 * 1024  # 4,096 peers and 512 rounds are about 6 MB
HISTORY = 512  # rounds in a RunStatus; the coordinator's database keeps them all
POINTS = 512  # of the curve of all rounds before those; a pane has fewer columns
EVENTS = 256  # newest events in a RunStatus
MAX_PEERS_SHOWN = 4096  # in a RunStatus
MAX_UNREACHED = 16  # peers that one names as out of its reach
MAX_GAPS = 64  # newest gaps in a RunStatus
MAX_MODULES = 64  # of a run
MAX_LOOK_S = 30.0  # a dashboard that is older says how old it is, and a person would think it hangs

RunState = Literal["waiting", "training", "paused", "stalled", "finished"]
PeerReach = Literal["", "direct", "upnp", "hole", "relayed"]
PeerState = Literal[
    "joining", "ready", "training", "syncing", "recovering", "leaving", "left", "gone"
]

Name = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Hex = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0)]
Seconds = Annotated[dict[Name, Amount], Field(max_length=32)]
TimeUse = Literal["train", "pause", "outer", "wait", "validate", "save", "other"]
TimeShares = dict[TimeUse, Fraction]
Reason = Annotated[str, Field(max_length=200)]
NAMED_PEERS = 64  # peers that a round names individually; 64 in 512 rounds are about 4 MB
Reasons = Annotated[dict[Name, Reason], Field(max_length=NAMED_PEERS)]
PeerBytes = Annotated[dict[Name, Count], Field(max_length=NAMED_PEERS)]
Reasoned = Annotated[dict[Name, Count], Field(max_length=16)]
WITHDRAWN = "withdrawn"  # of a microbatch: what a peer that leaves its stage gives up


def _expect_small(fields: dict[str, Any]) -> dict[str, Any]:
    if size_of(fields) > MAX_CHARS:
        raise ValueError(f"expected at most {MAX_CHARS} characters, got {size_of(fields)}")
    return fields


Code = Annotated[str, Field(max_length=48, pattern=r"^([a-z0-9_]+(\.[a-z0-9_]+)+)?$")]
Words = Annotated[str, Field(max_length=MAX_VALUE_CHARS)]
FieldName = Annotated[str, Field(max_length=32, pattern=r"^[a-z][a-z0-9_]*$")]
FieldValue = (
    bool
    | Annotated[int, Field(ge=-(2**63), lt=2**63)]
    | float
    | Words
    | Annotated[list[Words], Field(max_length=MAX_ITEMS)]
)
Fields = Annotated[
    dict[FieldName, FieldValue], Field(max_length=MAX_FIELDS), AfterValidator(_expect_small)
]

_CONFIG = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always"
)


class StatusError(ValueError):
    """The bytes are not a valid record."""


class StatusRecord:
    """A dataclass with validated JSON in both directions."""

    _max_bytes = MAX_RECORD_BYTES

    def to_json(self) -> bytes:
        """Return compact UTF-8 JSON. Raises StatusError if a value is out of range."""
        adapter = _adapter(type(self))
        try:
            return adapter.dump_json(adapter.validate_python(self))
        except ValueError as error:
            raise _explain(type(self).__name__, error) from None

    @classmethod
    def from_json(cls, raw: bytes | bytearray | memoryview) -> Self:
        """Parse and validate a record. Raises StatusError."""
        if len(raw) > cls._max_bytes:
            expected = f"expected at most {cls._max_bytes} bytes"
            raise StatusError(f"{cls.__name__}: {expected}, got {len(raw)}")
        try:
            record: Self = _adapter(cls).validate_json(bytes(raw))
        except ValueError as error:
            raise _explain(cls.__name__, error) from None
        return record


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _explain(name: str, error: ValueError) -> StatusError:
    if not isinstance(error, ValidationError):
        return StatusError(f"{name}: {str(error)[:200]}")
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:100]
    return StatusError(f"{name}: {where}: {first['msg']}" if where else f"{name}: {first['msg']}")


@dataclass(frozen=True, kw_only=True)
class Event(StatusRecord):
    """A notable event, shown as one line of the event log."""

    __pydantic_config__ = _CONFIG

    at: Amount
    """Seconds since 1970 by the coordinator's clock."""
    level: Level = "info"
    source: Name = ""
    """PeerID, or 'coordinator'."""
    text: Text
    """The fact and its remedy, for people."""
    code: Code = ""
    """Says what happened, as docs/events.md lists it; empty before events had codes."""
    fields: Fields = field(default_factory=dict, hash=False)
    """The facts that the text states, by name."""

    @classmethod
    def of(cls, notice: str, level: Level, *, at: float, source: str = "") -> Event:
        """Return the event of a notice, cut to what an event may hold."""
        told = Notice.of(notice)
        return cls(
            at=at,
            level=level,
            source=source[:128],
            text=told[:MAX_TEXT],
            code=told.code,
            fields=told.fields,
        )

    @property
    def notice(self) -> Notice:
        """Return what it states."""
        return Notice(self.text, self.code, self.fields)


@dataclass(frozen=True, kw_only=True)
class RoundReport(StatusRecord):
    """One peer's report on one round, sent once the round is settled."""

    __pydantic_config__ = _CONFIG

    epoch: Count = 0
    position: Count
    included: bool
    """True if the entry holds the peer's whole contribution."""
    loss: float | None = None
    """Mean training loss of the peer's window, in nats per token."""
    tokens: Count = 0
    seconds: Seconds = field(default_factory=dict)
    """Duration of each part, by `RoundStage`."""
    wire_bytes_sent: Count = 0
    wire_bytes_received: Count = 0
    left_out: Annotated[list[Name], Field(max_length=4096)] = field(default_factory=list)
    """Peers that this round continued without, as the sender saw it."""
    rejected: Amount = 0.0
    """L2 norm of what a robust reducer removed from the parts that this peer reduced."""
    reasons: Reasons = field(default_factory=dict)
    """Why peers were left out, by PeerID; with many of them some have no reason."""


@dataclass(frozen=True, kw_only=True)
class FlowStatus(StatusRecord):
    """The passes through a peer of a pipeline since its process began, and those that are there."""

    __pydantic_config__ = _CONFIG

    counted: Count = 0
    """Microbatches whose gradients it added up."""
    in_flight: Count = 0
    """Microbatches in work here, those included that are further on."""
    queued: Count = 0
    """Jobs that wait for its trainer."""
    omitted: Reasoned = field(default_factory=dict)
    """Microbatches that it gave up, by reason: late, failed, no-peer, withdrawn."""
    resends: Count = 0
    """Outputs that it sent again, to replace a peer that was lost or silent."""
    busy_answers: Count = 0
    """Microbatches that it had no room for."""
    late_returns: Count = 0
    """Gradients that came after it had given the microbatch up."""
    double_counts: Count = 0
    """Microbatches of its own that counted at two peers of one stage."""
    held_bytes: Count = 0
    able_tokens_per_s: Amount = 0.0
    """Rate at which it can work in its stage if there is always work; 0 before it was measured."""
    waited_s: Seconds = field(default_factory=dict)
    """Its trainer's time without a job, by what it waited for: input, route, returns, step,
    drain."""

    @property
    def num_omitted(self) -> int:
        """Microbatches that it gave up, but for those that it left behind when it ended."""
        return sum(n for reason, n in self.omitted.items() if reason != WITHDRAWN)

    @property
    def waits_for(self) -> str:
        """The longest wait of its trainer, by name; empty if it did not wait."""
        return max(self.waited_s, key=self.waited_s.__getitem__, default="")


@dataclass(frozen=True, kw_only=True)
class PeerStatus(StatusRecord):
    """One peer's state, as reported by its last heartbeat."""

    __pydantic_config__ = _CONFIG

    peer_id: Name
    name: Name = ""
    """The owner's name for it; by default the last letters of its PeerID."""
    role: Literal["trainer", "follower", "keeper"] = "trainer"
    module: Name = ""
    """The module of the run whose log it follows; empty in a dense run."""
    incarnation: Name = ""
    """New at each start of the process."""
    state: PeerState = "joining"
    phase: Name = ""
    """Part of the round: train, wait, reduce, late, idle."""
    epoch: Count = 0
    position: Count = 0
    """Number of entries applied."""
    chain: Hex = ""
    state_digest: Hex = ""
    """Root of parameters and outer state at `state_position`, as last computed."""
    state_position: Count = 0
    tokens_per_s: Amount = 0.0
    tokens_total: Count = 0
    loss: float | None = None
    """Training loss, in nats per token."""
    valid_loss: float | None = None
    step: Count = 0
    """Inner steps done in the current window."""
    inner_steps: Count = 0
    """Inner steps of a window."""
    wire_bytes_sent: Count = 0
    wire_bytes_received: Count = 0
    uplink_mbit_s: Amount = 0.0
    """Measured capacity of the link; 0 if unknown."""
    downlink_mbit_s: Amount = 0.0
    uplink_use: Fraction = 0.0
    """Fraction of the capacity in use."""
    downlink_use: Fraction = 0.0
    utilisation: Fraction = 0.0
    """Fraction of the time spent training, over its last windows and of its `--share`."""
    time_shares: TimeShares = field(default_factory=dict)
    """All of the time by use, as the trainer tells it apart; empty if it does not."""
    last_seen_s: Amount = 0.0
    """Seconds since the coordinator last heard from it."""
    phases: Seconds = field(default_factory=dict)
    """Durations in the last round: wait, encode, send, reduce, vote, apply."""
    recoveries: Count = 0
    """Number of times this process fetched its state from others, its first join included."""
    partner: Name = ""
    """In a gossip run, PeerID of the current or last partner."""
    device: Name = ""
    version: Name = ""
    reach: PeerReach = ""
    """The way to it: others dial it, perhaps at a port that its router forwards by UPnP; or a
    router lets nobody in, and peers behind other routers come through holes, or at least one of
    them through a relay."""
    relays: Annotated[list[Name], Field(max_length=16)] = field(default_factory=list)
    """PeerIDs of its relays, the first choice first."""
    relayed_bytes: Count = 0
    """Sent and received through relays."""
    unreached: Annotated[list[Name], Field(max_length=MAX_UNREACHED)] = field(default_factory=list)
    """PeerIDs of trainers in the run that it cannot reach, nor through a relay."""
    rounds_seen: Count = 0
    """Rounds that were decided since this process began to train."""
    rounds_counted: Count = 0
    """Those of them that took its work, at least in part."""
    tokens_counted: Count = 0
    """Tokens of the work that they took."""
    outcome: Outcome | None = None
    """The outcome of its work in the last of them."""
    flow: FlowStatus | None = None
    """In a pipeline; None before its trainer is there, and in a dense run."""

    def seen(self, last_seen_s: float) -> PeerStatus:
        """Return the status of a peer that was heard from so many seconds ago.

        `dataclasses.replace` takes 20 us, and a status of a run has thousands of peers.
        """
        seen = copy(self)
        object.__setattr__(seen, "last_seen_s", last_seen_s)
        return seen


@dataclass(frozen=True, kw_only=True)
class RoundSummary(StatusRecord):
    """One decided position."""

    __pydantic_config__ = _CONFIG

    epoch: Count = 0
    position: Count
    """The log position after the entry: 1 after the first round."""
    at: Amount
    """Seconds since 1970 when the coordinator learned of it."""
    late: bool = False
    """True if the run had moved on by then: `at` is not the time of the round."""
    loss: float | None = None
    valid_loss: float | None = None
    tokens: Count = 0
    """That moved the model: windows of weight 0 do not."""
    members: Count = 0
    left_out: Annotated[list[Name], Field(max_length=4096)] = field(default_factory=list)
    seconds: Seconds = field(default_factory=dict)
    """Mean over the members' traces, by phase."""
    rejected: Amount = 0.0
    """L2 norm of what a robust reducer removed from the update; no peer carries it on."""
    reasons: Reasons = field(default_factory=dict)
    """Why peers were left out, wholly or from a cell on, by the peers that did so."""
    wire_bytes: Count = 0
    """Bytes that all members together sent, as counted on the wire."""
    peer_bytes: PeerBytes = field(default_factory=dict)
    """The same by PeerID; if there are many, those that sent most."""
    chain: Hex = ""


@dataclass(frozen=True, kw_only=True)
class PeerShare(StatusRecord):
    """What rounds have taken from a peer since the run began, whenever its process did."""

    __pydantic_config__ = _CONFIG

    peer_id: Name
    module: Name = ""
    tokens: Count = 0
    rounds: Count = 0
    """Rounds that took its work, at least in part."""
    missed: Count = 0
    """Rounds with an update after its first one that took nothing of it."""


@dataclass(frozen=True, kw_only=True)
class LossPoint(StatusRecord):
    """Some consecutive rounds, as one point of a curve."""

    __pydantic_config__ = _CONFIG

    position: Count
    """After the last of them."""
    at: Amount
    """Seconds since 1970 of the last of them."""
    tokens: Count = 0
    """Of all rounds up to there."""
    loss: float | None = None
    """Mean over them."""
    valid_loss: float | None = None
    """The last one that was measured in them."""


def seconds_between(before: RoundSummary, after: RoundSummary) -> float | None:
    """Return the seconds from one round to the next, or None if either was learned of late."""
    return None if before.late or after.late else max(0.0, after.at - before.at)


@dataclass(frozen=True, kw_only=True)
class Gap(StatusRecord):
    """Rounds that the coordinator missed and whose updates no peer has kept.

    Its log holds their certified entries without bodies, so they cannot be replayed.
    """

    __pydantic_config__ = _CONFIG

    first: Count
    last: Count


@dataclass(frozen=True, kw_only=True)
class CopyStatus(StatusRecord):
    """How far the copies are from which another machine can continue the run."""

    __pydantic_config__ = _CONFIG

    at: Amount | None = None
    """Seconds since 1970 when the newest one was found current; None before the first."""
    position: Count = 0
    """Entries in it; of a pipeline those of the stage that has fewest."""
    failing: Reason = ""
    """Why the target takes none at present; empty if it does."""
    failing_since: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class RowsStatus(StatusRecord):
    """Progress through the rows of a run with `data.once`, as its log has it."""

    __pydantic_config__ = _CONFIG

    number: Count
    """The pass, from 1."""
    done: Count
    """Units of the pass that updates hold."""
    held: Count
    """Units that peers train on, or will next."""
    total: Count
    """Units of a pass."""


@dataclass(frozen=True, kw_only=True)
class ModuleStatus(StatusRecord):
    """One module of a run of several, as its coordinator knows it."""

    __pydantic_config__ = _CONFIG

    name: Name
    state: RunState = "waiting"
    epoch: Count = 0
    position: Count = 0
    """Entries that the coordinator holds."""
    chain: Hex = ""
    params: Count = 0
    """Trainable parameters."""
    peers: Count = 0
    """Trainers online."""
    tokens_per_s: Amount = 0.0
    """Of these together."""
    utilisation: Fraction = 0.0
    """Mean fraction of the time that they compute."""
    in_flight: Count = 0
    """Microbatches in work at them, those included that are further on."""
    queued: Count = 0
    """Jobs that wait for their trainers."""
    omitted: Count = 0
    """Microbatches that they gave up, but for those of peers that left."""
    double_counts: Count = 0
    """Microbatches that they sent out and that counted at two peers of one stage."""
    moves: Count = 0
    """Peers that came from another module since the coordinator's start."""
    waits_for: Name = ""
    """What their trainers have waited for most, as in `FlowStatus`; empty if they did not."""
    binds: bool = False
    """True if the other stages wait for this one (`coordinator.module_status.with_binding`)."""


@dataclass(frozen=True, kw_only=True)
class RunStatus(StatusRecord):
    """A run at one moment, as its coordinator knows it."""

    __pydantic_config__ = _CONFIG
    _max_bytes = MAX_RUN_BYTES

    run_name: Name
    run_id: Hex
    state: RunState = "waiting"
    epoch: Count = 0
    position: Count = 0
    """Entries that the coordinator holds; peers may be ahead."""
    look_every_s: Annotated[float, Field(ge=0, le=MAX_LOOK_S)] = 0.0
    """Least seconds between two looks of one watcher, as many look at much; 0 for no limit."""
    rounds_total: Count = 0
    """0: until stopped."""
    min_peers: Count = 1
    min_keepers: Count = 0
    """Keepers without which no epoch opens; 0 if members vote."""
    chain: Hex = ""
    started_at: Amount | None = None
    """Seconds since 1970 when the first epoch opened."""
    now: Amount = 0.0
    """Seconds since 1970 by the coordinator's clock when this status was made."""
    tokens_total: Count = 0
    tokens_per_s: Amount = 0.0
    loss: float | None = None
    valid_loss: float | None = None
    utilisation: Fraction = 0.0
    peers: Annotated[list[PeerStatus], Field(max_length=MAX_PEERS_SHOWN)] = field(
        default_factory=list
    )
    contributions: Annotated[list[PeerShare], Field(max_length=MAX_PEERS_SHOWN)] = field(
        default_factory=list
    )
    """Of the peers whose work counted last, those that left included."""
    history: Annotated[list[RoundSummary], Field(max_length=HISTORY)] = field(default_factory=list)
    """The newest rounds, oldest first."""
    earlier: Annotated[list[LossPoint], Field(max_length=POINTS)] = field(default_factory=list)
    """The rounds before those in `history`, a few of them at a point, oldest first."""
    gaps: Annotated[list[Gap], Field(max_length=MAX_GAPS)] = field(default_factory=list)
    """Rounds, numbered as in `RoundSummary`, without stored updates; the newest gaps."""
    events: Annotated[list[Event], Field(max_length=EVENTS)] = field(default_factory=list)
    """The newest events, oldest first."""
    codec: Name = ""
    method: Name = ""
    inner_steps: Count = 0
    settings: Annotated[dict[Name, Amount], Field(max_length=16)] = field(default_factory=dict)
    """The numbers that the organiser's orders have set, by name."""
    evicted: Annotated[list[Name], Field(max_length=64)] = field(default_factory=list)
    """PeerIDs that orders have put out."""
    reducer: Name = ""
    """The rule of reduction that an order has set."""
    orders_waiting: Count = 0
    """Orders that were given and are not decided yet."""
    params: Count = 0
    """Trainable parameters."""
    modules: Annotated[list[ModuleStatus], Field(max_length=MAX_MODULES)] = field(
        default_factory=list
    )
    """The modules of a run of several, in order; empty in a dense run."""
    copies: CopyStatus | None = None
    """None if the coordinator keeps none."""
    rows: RowsStatus | None = None
    """None in a run without `data.once`."""
