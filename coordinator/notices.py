"""The coordinator's events: of each its code, its fields, and the sentence made of them.

docs/events.md says what each one means and what to do. Codes and fields are read by programs, so
they stay; sentences may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.coordinator.checkpoints import after_rounds
from atoll.coordinator.run.notice import CANNOT_REACH, Notice, event
from atoll.dht.identity import short
from atoll.optim.log.mending import Damage
from atoll.optim.log.orders import Order, described

# peers

LOG_LOST = "log.lost"
ELSEWHERE = "coordinator.elsewhere"


@event("peer.joined")
def peer_joined(*, role: str, version: str, newer_than: str | None = None) -> str:
    newer = "" if newer_than is None else f", newer than the {newer_than} here"
    return f"joined as {role} (version {version}{newer})"


@event("peer.left")
def peer_left() -> str:
    return "left"


@event("peer.restarted")
def peer_restarted() -> str:
    return "restarted"


@event("peer.back")
def peer_back() -> str:
    return "is back"


@event("peer.gone")
def peer_gone(*, silent_s: float) -> str:
    return f"no report for {silent_s:g} s; counts as gone"


@event("peers.apart")
def peers_apart(*, peers: Sequence[str]) -> str:
    return f"{' and '.join(peers)} {CANNOT_REACH}"


@event("peers.more_apart")
def more_peers_apart(*, pairs: int) -> str:
    return f"{pairs} more pairs of peers {CANNOT_REACH}"


@event("peer.evicted")
def peer_evicted(*, peer: str, reason: str) -> str:
    return f"evicted {short(peer)}{f': {reason}' if reason else ''}"


@event("invite.revoked")
def invite_revoked(*, invite: str, peers: int) -> str:
    return f"invite {invite} is revoked, and with it {peers} peers that joined by it"


@event("peer.bad_body")
def bad_body(*, reason: str) -> str:
    return f"sent an invalid body: {reason}"


@event("peer.bad_evidence")
def bad_evidence(*, reason: str) -> str:
    return f"sent evidence that proves nothing: {reason}"


# the run and its orders


@event("run.complete")
def run_complete(*, rounds: int) -> str:
    return f"run complete: all {rounds} rounds committed"


@event("order.given")
def order_given(effect: str, /, *, number: int, change: str, value: str | None) -> str:
    return f"given: {effect}"


@event("order.decided")
def order_decided(
    effect: str, /, *, round: int, number: int, change: str, value: str | None
) -> str:
    return f"round {round}: {effect}"


def given(order: Order) -> Notice:
    """Return the event of an order that the coordinator has taken."""
    return order_given(described(order), **_facts(order))


def decided(order: Order, round_: int) -> Notice:
    """Return the event of an order that is in the log."""
    return order_decided(described(order), round=round_, **_facts(order))


def _facts(order: Order) -> dict[str, Any]:
    change = order.change
    value = next(
        (
            getattr(change, name)
            for name in ("value", "peer_id", "after_round")
            if hasattr(change, name)
        ),
        None,
    )
    if isinstance(value, bytes):  # a key
        value = value.hex()
    return {
        "number": order.number,
        "change": change.kind,
        "value": None if value is None else str(value),
    }


# epochs


@event("epoch.opened")
def epoch_opened(
    *, epoch: int, position: int, electors: int, role: str, cause: str, came: int, went: int
) -> str:
    changes = [(came, "joined"), (went, "evicted")]
    told = (f"{n} keeper{'' if n == 1 else 's'} {how}" for n, how in changes if n)
    because = {
        "electors_left": ": acceptors left",
        "electors_lost": ": acceptors restarted, or fell silent",
        "keepers_changed": f": {', '.join(told)}",
    }.get(cause, "")
    whom = f"{electors} {role}{'' if electors == 1 else 's'}"
    return f"epoch {epoch} opened at position {position} with {whom}{because}"


@event("epoch.keepers_missing")
def keepers_missing(*, missing: int) -> str:
    return (
        f"waiting for {missing} keeper{'' if missing == 1 else 's'}; create an invite "
        "with `atoll invite --role keeper`"
    )


@event("epoch.rounds_void")
def rounds_void(*, rounds: int) -> str:
    return f"{rounds} rounds are void: no peer can show how to get there"


@event("epoch.rounds_missing")
def rounds_missing(*, rounds: int) -> str:
    return f"{rounds} rounds are missing here; a new epoch opens once they are fetched"


@event("epoch.learned")
def epoch_learned(*, epoch: int) -> str:
    return f"epoch {epoch} learned from peers; fetching its entries"


@event(LOG_LOST)
def log_lost(*, epoch: int | None, position: int | None, known_rounds: int | None) -> str:
    if position is not None:
        what = f"the log here ends after round {position} of {known_rounds}"
    else:
        signed = "may have signed epochs" if epoch is None else f"has signed epoch {epoch}"
        what = f"the run's key {signed}, which the log here lacks"
    return (
        f"{what}: it was lost, or is an old copy. No epoch opens until peers have sent what is "
        "missing; keep the peers running. If none has it any more, restart with --accept-loss: "
        "the run then continues from the log here"
    )


@event(ELSEWHERE)
def coordinator_elsewhere(*, addresses: Sequence[str], file: str, becomes: str) -> str:
    return (
        "this run's key has signed, and it counts more, that its coordinator is at "
        f"{' and '.join(addresses)}: two coordinators of one run open epochs against each other. "
        f"Stop this one if it has moved; otherwise stop both, rename {file} here to {becomes}, and "
        "start this one again"
    )


# the log, the disk, checkpoints and copies


@event("log.damaged")
def log_damaged(
    *,
    entries: int,
    entries_from: int | None,
    updates: Sequence[int],
    certificates: Sequence[int],
    snapshots: Sequence[int],
    epochs: Sequence[int],
    first_state: bool,
) -> str:
    damage = Damage(
        entries_from=entries_from,
        entries=entries,
        bodies=list(updates),
        certificates=list(certificates),
        snapshots=list(snapshots),
        epochs=list(epochs),
        first_state=first_state,
    )
    return str(damage)


def of_damage(damage: Damage) -> Notice:
    """Return the event of a log that was found damaged."""
    return log_damaged(
        entries=damage.entries,
        entries_from=damage.entries_from,
        updates=damage.bodies,
        certificates=damage.certificates,
        snapshots=damage.snapshots,
        epochs=damage.epochs,
        first_state=damage.first_state,
    )


@event("log.recovered")
def log_recovered() -> str:
    return "damaged records recovered from peers"


@event("log.unreadable")
def log_unreadable(*, reason: str) -> str:
    return f"the log on disk cannot be read: {reason}"


@event("log.diverged")
def log_diverged(*, reason: str) -> str:
    return reason


@event("log.caught_up")
def caught_up(
    *,
    from_round: int,
    to_round: int,
    snapshot: int | None,
    donors: Sequence[str],
    lost: Sequence[int],
) -> str:
    names = ", ".join(map(short, donors)) or "no peer"
    by_snapshot = "" if snapshot is None else f"the snapshot after round {snapshot} and "
    gap = f"; no peer has kept the updates of rounds {lost[0]} to {lost[-1]}" if lost else ""
    return (
        f"caught up from round {from_round} to {to_round} by {by_snapshot}entries of {names}{gap}"
    )


@event("log.behind")
def behind(*, reason: str) -> str:
    return f"catching up failed, retrying: {reason}"


@event("disk.full")
def disk_full(*, reason: str) -> str:
    return (
        f"the coordinator cannot write its state ({reason}); free space on its disk. Training "
        "continues, and the coordinator then fetches what it missed"
    )


@event("checkpoint.written")
def checkpoint_written(*, file: str, round: int) -> str:
    return f"checkpoint {file} written"


@event("checkpoint.stages_written")
def stages_written(*, rounds: Sequence[int], stages: Sequence[str] | None = None) -> str:
    which = "all stages" if stages is None else ", ".join(stages)
    return f"checkpoint of {which} written, {after_rounds(rounds)}"


@event("checkpoint.failed")
def checkpoint_failed(*, reason: str) -> str:
    return reason


@event("model.stored")
def model_stored(*, peer: str, round: int) -> str:
    return f"stored the model of {short(peer)} after round {round}"


@event("copies.begun")
def copies_begun(*, round: int) -> str:
    return f"copied after round {round}"


@event("copies.recovered")
def copies_recovered(*, round: int) -> str:
    return f"copies work again: the newest is after round {round}"


@event("copies.failing")
def copies_failing(*, reason: str) -> str:
    return f"copies fail, retrying: {reason}; see the coordinator's output"


# ports


@event("ports.found")
def ports_found(found: str, /, *, grpc: str, p2p: str) -> str:
    return found


@event("ports.closed")
def ports_closed(found: str, /, *, grpc: str, p2p: str) -> str:
    return found
