"""A peer's events of rounds, and of how others behave in them; see `atoll.peer.notices`.

A `round` is the one that an entry commits: its position and one.
"""

from __future__ import annotations

import math

from atoll.coordinator.run.notice import Notice, event
from atoll.dht.identity import short
from atoll.peer.rounds.conduct import Barred

# rounds


@event("round.left_out")
def left_out(*, round: int, counted: int, chunks: int) -> str:
    return (
        f"round {round}: {counted} of {chunks} chunks of "
        "this peer count; the rest stays in its next contribution"
    )


@event("round.no_quorum")
def no_quorum(until: str, /, *, round: int, online: int, acceptors: int) -> str:
    return (
        f"no quorum for round {round}: {online} of {acceptors} acceptors "
        f"online (a restarted peer does not count); training continues locally until {until}"
    )


@event("round.closed_before")
def closed_before(*, round: int, reason: str) -> str:
    return f"round {round}: {reason}"


@event("round.given_up")
def given_up(*, round: int, reason: str) -> str:
    return f"round {round}: given up: {reason}"


@event("round.forked")
def forked(*, round: int) -> str:
    return (
        f"round {round}: two certified entries: the log has forked; only a new epoch can rejoin it"
    )


@event("round.reduced_again")
def reduced_again(*, round: int, peer: str) -> str:
    return (
        f"round {round}: reducing again what was reduced early: "
        f"{short(peer)} does not lead the round"
    )


@event("round.leader_refused")
def leader_refused(advice: str, /, *, round: int, peer: str, reason: str) -> str:
    return f"round {round}: {short(peer)} refused: {reason}{advice}"


@event("round.term_failed")
def term_failed(*, round: int, term: int, reason: str) -> str:
    return f"round {round}, term {term}: {reason}"


@event("round.own_term_failed")
def own_term_failed(*, round: int, term: int, reason: str) -> str:
    return f"round {round}, term {term}, led by this peer, failed: {reason}"


@event("round.no_vote")
def no_vote(*, round: int, peer: str, reason: str) -> str:
    return f"round {round}: no vote from {short(peer)}: {reason}"


@event("round.omitted")
def omitted(*, round: int, peer: str, reported_s: float) -> str:
    return (
        f"round {round}: {short(peer)} left this peer out, which had "
        f"reported to it {reported_s:.1f} s before"
    )


@event("round.part_reassigned")
def part_reassigned(*, round: int, part: int, peer: str) -> str:
    return f"round {round}: part {part} is reassigned to {short(peer)}"


@event("round.part_lost")
def part_lost(*, round: int, part: int, peer: str, reason: str) -> str:
    return f"round {round}: lost part {part} of {short(peer)}: {reason}"


@event("round.row_lost")
def row_lost(*, round: int, row: int, peer: str, reason: str) -> str:
    return f"round {round}: relay {short(peer)} sends no more sums of row {row}: {reason}"


@event("round.relay_failed")
def relay_failed(*, round: int, part: int, peer: str, reason: str) -> str:
    return (
        f"round {round}: sending part {part} directly to its owner; "
        f"relay {short(peer)} failed: {reason}"
    )


@event("round.member_dropped")
def member_dropped(*, round: int, peer: str, reason: str) -> str:
    return f"round {round}: left out {short(peer)}: {reason}"


@event("round.not_waiting")
def not_waiting(*, round: int, peer: str) -> str:
    return f"round {round}: not waiting for chunks from {short(peer)} for a while"


@event("gossip.failed")
def exchange_failed(*, round: int, peer: str, reason: str) -> str:
    return f"round {round}: the exchange with {short(peer)} failed: {reason}"


@event("gossip.unknown")
def exchange_unknown(*, round: int, peer: str) -> str:
    return (
        f"{short(peer)} is gone, so it is unknown whether round {round} was committed; "
        "this peer's weights count again after its next exchange"
    )


# how others behave


@event("fault.barred")
def barred(how: str, /, *, peer: str, fault: str, left_s: float | None) -> str:
    return f"{short(peer)} is {how}"


def of_barred(peer: str, barring: Barred) -> Notice:
    """Return the event of a peer that is left out from now on."""
    left_s = barring.left_s if math.isfinite(barring.left_s) else None
    return barred(str(barring), peer=peer, fault=barring.why, left_s=left_s)


@event("fault.two_signed")
def signed_two(*, round: int, peer: str, kind: str) -> str:
    return f"round {round}: {short(peer)} signed two {kind}s and is banned permanently"


@event("fault.own_key_twice")
def own_key_twice() -> str:
    return "this peer's key signed two entries; stop its other process"


@event("fault.evidence_damaged")
def evidence_damaged(*, reason: str) -> str:
    return f"stored evidence is damaged and was ignored: {reason}"


@event("fault.no_parts")
def gives_no_parts(*, peer: str) -> str:
    return f"giving {short(peer)} no parts for a while: it did not finish them in time before"


@event("fault.not_reporting")
def reports_no_longer(*, peer: str) -> str:
    return (
        f"reporting to {short(peer)} no longer for a while: it leads rounds without this "
        "peer, and others include it"
    )


@event("fault.usurper")
def usurper(*, peer: str) -> str:
    return (
        f"promising {short(peer)} only terms whose turn has come, for a while: it ended "
        "terms that this peer led"
    )


@event("fault.broke_promise")
def broke_promise(*, peer: str) -> str:
    return (
        f"groups led by this peer wait for {short(peer)} no longer: it said that it "
        "was ready, and did not report"
    )


@event("fault.eager_refused")
def eager_refused(*, peer: str, reason: str, refused: int) -> str:
    return (
        f"{short(peer)} {reason}; its eager send is refused until the group is closed "
        f"({refused} so far, of all peers)"
    )
