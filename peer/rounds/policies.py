"""The decisions of a round, as pure functions of a view. Nothing here waits or sends.

The weight rule, the weight cap and the clip factors are the optimizer's
(`atoll.optim.reduction.contribution`);
who leads, who votes and what a quorum is belong to the log (`atoll.optim.log.entry`).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from atoll.optim.log.entry import Elector, MalformedRecord, Member, Trust, Verify, is_quorum
from atoll.optim.reduction.contribution import (
    WeightRule,
    WorkRefused,
    admitted_clips,
    cap_weights,
    work_weight,
)
from atoll.peer.rounds.messages import PartPlan, Report, Sworn, is_large, report_payload

# A group without a quorum of electors closes after so many graces all the same: its work is
# reduced, and may still be voted for by electors that trained nothing.
ALONE_GRACES = 3
# A group of one waits for trainers that are at most so many times slower: a round that waits five
# windows for another peer is worth less to the run than five rounds of one peer.
LONE_WINDOWS = 4
POLL_STALLS = 10  # of a question before there is a group, which has a deadline of its own
OWNERS_SHARE = 0.75  # of the deadline: more than senders have, less than the round has
MARGIN_STALLS = 4  # for messages under way and loops that are busy, beyond what a leader may take
MOST_BELOW_MEDIAN = 4  # as much as weights may be above theirs: honest links differ by less
# Of the upper median, if half of a group may lie: a liar beside one honest peer may declare any
# rate. A quarter of it is the least that counts, so that a lie upwards costs no peer of more than
# 3 Mbit/s its chunks.
HALF_MBIT_S = 40.0
MAX_MBIT_S = 1e5  # a claim beyond 100 Gbit/s is cut to it
# Streams of a reduction that a member has open, about. On a new stream yamux lets 256 KiB be under
# way, and it learns only slowly that the link takes more; a dozen fill 100 Mbit/s at 250 ms, queues
# included.
STREAMS = 12
MIN_PART_BYTES = 1 << 18  # of reduced cells, below which a part is not cut further: one window


# A new cut makes members send their codes, half of the bytes, once more. The rates that rounds
# measure scatter on a busy machine: 27 to 46 Mbit/s were read of four links that had 50.
KEEP_PARTS = 1.25
# An uneven split comes from a noisy bandwidth estimate; prefer an even one unless it is 10% slower.
KEEP_UNEVEN = 1.1
WORTH_S = 0.2  # on the links; less than that is not worth an owner's work at others
CUT_EVERY = 4  # updates of a fragment; the second one is cut by what the first has shown

# Positions that may be reduced before their turn: each holds frames, sums and parts in memory, and
# is reduced again if an entry before it changes the leader. Four in flight hide a reduction of four
# windows; a link on which it takes longer is too slow for its run.
MAX_AHEAD = 3

# A row has four times as many members as there are rows. A member knows its row, and the relays of
# all rows twice: fewer connections need rows of sqrt(2 P), fewer bytes of sums longer ones.
ROW_SHAPE = 4
SUM_BYTES = 4  # of a value in fp32


class Close(Enum):
    """The decision on a forming group."""

    WAIT = "wait"
    CLOSE = "close"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A leader's view of a forming group. Times are seconds on one clock."""

    ready: Collection[str]
    """peers that reported ready"""
    expected: Mapping[str, float]
    """peers that are alive at this position, and when each expects to be ready (absolute)"""
    awaited: Collection[str]
    """the electors, or all trainers if keepers vote: while a quorum of them is missing, the group
    waits longer"""
    opened_at: float
    """when the position came to be decided next; infinite before its turn"""
    last_s: float
    """how long the last position was next, of those decided by their first ballots"""
    first_ready_at: float
    quorum_ready_at: float | None
    """when a quorum of those awaited was ready, None while it is not"""
    grace_s: float
    alone_s: float
    """after this long without a quorum the group closes with the peers that are ready, unless
    peers that are awaited are about to be ready"""


def close_decision(view: Rendezvous, now: float) -> Close:
    """Close once all expected peers are ready, or an adaptive grace has passed.

    The grace runs from the moment at which a quorum of electors is ready, and covers only peers
    that expect to be ready within it: a straggler loses nothing (its progress stays in its drift),
    so no peer waits for one that reports that it will be late. A group of one waits longer: alone,
    it would spend a round of the run on work of its own.
    """
    if not view.ready:
        return Close.WAIT
    missing = [at for peer, at in view.expected.items() if peer not in view.ready]
    if not missing:
        return Close.CLOSE
    if len(view.ready) == 1 and now < _lone_until(view, min(missing)):
        return Close.WAIT
    if view.quorum_ready_at is None:
        return Close.WAIT if now < _alone_until(view) else Close.CLOSE
    limit = view.quorum_ready_at + view.grace_s
    worth_waiting = any(at <= limit for at in missing)
    return Close.WAIT if now < limit and worth_waiting else Close.CLOSE


def _alone_until(view: Rendezvous) -> float:
    """Until when a group waits for a quorum of its electors.

    Electors that will be ready are waited for as long as the first peer's window took, or the last
    position, and the grace. Without that, two halves of a run whose windows are longer than the
    grace would, once out of step, each close alone in the middle of the other's window, each time.
    All of it counts from the position's turn: a slow peer hands in its fragment long before that,
    and would otherwise continue alone.
    """
    alone = max(view.first_ready_at, view.opened_at) + view.alone_s
    limit = alone + max(view.last_s, view.first_ready_at - view.opened_at)
    promised = [view.expected.get(peer, math.inf) for peer in set(view.awaited) - set(view.ready)]
    return limit if any(at <= limit for at in promised) else alone


def _lone_until(view: Rendezvous, first_at: float) -> float:
    """Until when a group of one waits for the first other trainer, which is in its window.

    No longer than for a quorum, as members give their leader no more time (`group_patience_s`). If
    that was too short, the next position waits longer, as this one took longer. It does not wait
    for a trainer that is too slow for that in any case.
    """
    start = max(view.first_ready_at, view.opened_at)
    own_s = view.first_ready_at - view.opened_at
    longest_s = max(0.0, LONE_WINDOWS * own_s)
    if first_at > start + view.alone_s + longest_s:
        return start
    return start + view.alone_s + min(max(view.last_s, own_s), longest_s)


def admit(reports: Sequence[tuple[str, Report]], *, clip_at: float, carried: float) -> list[Member]:
    """Return members with their capped weights and clip factors; a bound of 0 clips none.

    The leader of a group, its members and its voters compute the same from the same reports, and
    from the norm that the log carries for the fragment.
    """
    weights = cap_weights([r.weight for _, r in reports])
    norms, steps = [r.norm for _, r in reports], [max(r.steps, 1) for _, r in reports]
    clips = admitted_clips(weights, norms, steps, at=clip_at, carried=carried)
    return [
        Member(
            peer_id=peer,
            incarnation=r.incarnation,
            weight=weight,
            clip=clip,
            norm=r.norm,
            tokens=r.tokens,
            steps=r.steps,
            loss=r.loss,
            units=r.units,
        )
        for (peer, r), weight, clip in zip(reports, weights, clips, strict=True)
    ]


def check_reports(
    members: Sequence[Member],
    sworn: Sequence[Sworn],
    place: tuple[int, int],
    *,
    run_id: bytes,
    rule: WeightRule,
    clip_at: float,
    carried: float,
    verify: Verify,
) -> None:
    """Check that each member's numbers are those that it signed, or follow from them.

    Args:
        members: of a group or an entry, in its order.
        sworn: what each of them signed in addition to its `Member`.
        place: (epoch, position).
        run_id: of the run.
        rule: how the run's method weighs contributions.
        clip_at: its bound of norms.
        carried: the norm that the log carries for the fragment; 0 if there is none.
        verify: checks a peer's signature.

    Raises:
        MalformedRecord: a member is invented, or a number is not its own.
    """
    if len(sworn) != len(members):
        raise MalformedRecord(f"expected {len(members)} signed reports, got {len(sworn)}")
    reports = [
        (member.peer_id, report_of(member, said, place, rule))
        for member, said in zip(members, sworn, strict=True)
    ]
    for (peer, report), said in zip(reports, sworn, strict=True):
        if not verify(peer, report_payload(run_id, report), said.signature):
            raise MalformedRecord(f"expected {peer}'s own report, got another")
    if admit(reports, clip_at=clip_at, carried=carried) != list(members):
        raise MalformedRecord("expected the weights and clip factors that follow from the reports")


def report_of(member: Member, said: Sworn, place: tuple[int, int], rule: WeightRule) -> Report:
    """Return the report that a member signed, if its numbers are its own.

    Raises:
        MalformedRecord: it claims work that no peer can do.
    """
    try:
        weight = work_weight(member.tokens, member.steps, rule) if said.counts else 0.0
    except WorkRefused as error:
        raise MalformedRecord(f"report of {member.peer_id}: {error}") from error
    return Report(
        epoch=place[0],
        position=place[1],
        incarnation=member.incarnation,
        weight=weight,
        tokens=member.tokens,
        steps=member.steps,
        loss=member.loss,
        norm=member.norm,
        uplink_mbit_s=said.uplink_mbit_s,
        units=member.units,
    )


def num_rows(members: int) -> int:
    """Return the number of rows of a large group."""
    return max(2, round(math.sqrt(members / ROW_SHAPE)))


def is_relayed(members: int, values: int, code_bytes: int) -> bool:
    """Return whether relays add up codes: a member's sums are no longer than its codes are.

    A member relays its row's share of the vector, in fp32. Codes of one bit a value are 1/32 of
    that, so only the rows of some 256 members are long enough.
    """
    sum_bytes = SUM_BYTES * values * num_rows(members) / members
    return is_large(members) and sum_bytes <= code_bytes


def may_own(
    is_dialed: Sequence[bool], uplinks_mbit_s: Sequence[float], lags: Sequence[bool]
) -> list[bool]:
    """Return which members may own parts: those that all others can dial, if there are any.

    Two members behind NATs reach each other through a third peer. If one of them owned a part, its
    bytes would cross that peer's link both ways, once for each of the others; an owner in that
    place receives them, and sends their sum. A member that declares less than a quarter of the
    group's median is no better place. Nor is one that did not finish its parts before.

    Args:
        is_dialed: whether others can dial the member.
        uplinks_mbit_s: the members' declared rates.
        lags: whether the member has made no progress before, here.
    """
    can = [True] * len(is_dialed)
    if not all(is_dialed):
        dialed = [
            one and not is_slow(rate, uplinks_mbit_s)
            for one, rate in zip(is_dialed, uplinks_mbit_s, strict=True)
        ]
        can = dialed if any(dialed) else can
    quick = [one and not lag for one, lag in zip(can, lags, strict=True)]
    return quick if any(quick) else can


def split_cells(
    sizes: Sequence[int], rates_mbit_s: Sequence[float], can_own: Sequence[bool] = ()
) -> list[PartPlan]:
    """Cut the cells into the parts of their owners; an owner may get none, or several.

    Several, because each part of each member is a stream of its own: `STREAMS` says why. A cut
    is made between the two cells nearest to where it should be, and the rest is shared out again.

    Args:
        sizes: bytes of each cell, about.
        rates_mbit_s: of the slower direction of each member's link.
        can_own: which members own parts (`may_own`); none stands for all.
    """
    ends, total = [0, *accumulate(sizes)], sum(sizes)
    shares = owners_shares(rates_mbit_s, can_own)
    sent_to = min(len(shares) - 1, sum(can_own) or len(shares))
    streams = -(-STREAMS // max(1, sent_to))
    plans: list[PartPlan] = []
    start, left = 0, sum(shares)
    for owner, share in enumerate(shares):
        parts = min(streams, max(1, int(share * total / MIN_PART_BYTES)))
        for _ in range(parts if share else 0):
            size = (total - ends[start]) * share / parts / left
            stop = _nearest(ends, ends[start] + size)
            left -= share / parts
            if stop > start:
                plans.append(PartPlan(start_cell=start, stop_cell=stop, owner=owner))
                start = stop
    return plans


def kept_parts(
    last: Sequence[PartPlan],
    best: Sequence[PartPlan],
    even: Sequence[PartPlan],
    rates_mbit_s: Sequence[float],
    *,
    turn: int,
    megabits: float,
) -> Sequence[PartPlan]:
    """The parts of the last entry; now and then others, if they are done much sooner.

    Codes that left before the group closed are those of the last entry's parts.

    Args:
        last: its owners being members now.
        best: of the same cells, by the rates.
        even: of the same cells, as if all rates were one.
        rates_mbit_s: of the slower direction of each member's link.
        turn: how many positions the fragment has had before.
        megabits: of all cells.
    """
    if turn % CUT_EVERY != 1:
        return last
    saved = _transfer(even, rates_mbit_s) - _transfer(best, rates_mbit_s)
    if megabits * saved < WORTH_S:
        rates_mbit_s, best = [1.0] * len(rates_mbit_s), even
    last_s, best_s, even_s = (_transfer(plans, rates_mbit_s) for plans in (last, best, even))
    if even_s <= KEEP_PARTS * best_s:
        return even if last_s > KEEP_UNEVEN * even_s else last
    return best if last_s > KEEP_PARTS * best_s else last


def _transfer(plans: Sequence[PartPlan], rates_mbit_s: Sequence[float]) -> float:
    """Return when the last link is done, in units of a whole vector at 1 Mbit/s."""
    total = plans[-1].stop_cell
    shares = [0.0] * len(rates_mbit_s)
    for plan in plans:
        shares[plan.owner] += (plan.stop_cell - plan.start_cell) / total
    others = len(shares) - 1
    return max(
        (1 - share + others * share) / max(rate, 1e-3)
        for share, rate in zip(shares, rates_mbit_s, strict=True)
    )


def _nearest(ends: Sequence[int], target: float) -> int:
    """Return how many cells end as near to the target as can be; `ends` begins with none."""
    above = bisect_left(ends, min(target, ends[-1]))
    if above == 0:
        return 0
    return above if ends[above] - target <= target - ends[above - 1] else above - 1


def owners_shares(rates_mbit_s: Sequence[float], can_own: Sequence[bool] = ()) -> list[float]:
    """Shares of the vector with which the members' links are done as early as they can be.

    Of P members the owner of a share s sends its codes of the rest and its results to all others,
    (1 - s) + (P - 1) s times the vector, and receives as much: the slower direction decides. So
    in a time t a link of rate c has room for s = (t c - 1) / (P - 2). The time is the least in
    which shares add up to 1 and everybody gets its own codes out; where that leaves room, shares
    are as equal as they can be, so that the death of an owner costs little.

    Args:
        rates_mbit_s: of the slower direction of each member's link.
        can_own: which members may have a share; none stands for all.
    """
    rates = [min(max(rate, 1e-3), MAX_MBIT_S) for rate in rates_mbit_s]
    if len(rates) <= 2:  # two send and receive the vector once, whoever owns what
        return [rate / sum(rates) for rate in rates]
    owns = can_own or [True] * len(rates)

    def room(time: float) -> list[float]:
        rooms = (min(1.0, max(0.0, (time * rate - 1) / (len(rates) - 2))) for rate in rates)
        return [room if own else 0.0 for room, own in zip(rooms, owns, strict=True)]

    codes_out = 1 / min(rates)
    limits = room(_least(lambda time: sum(room(time)) >= 1, codes_out, len(rates) * codes_out))
    level = _least(lambda level: sum(min(level, limit) for limit in limits) >= 1, 0.0, 1.0)
    return [min(level, limit) for limit in limits]


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from `low` to `high` from which on a condition holds."""
    if holds(low):
        return low
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def positions_ahead(fragments: int) -> int:
    """Return how many positions may be reduced in addition to the one decided next.

    Each moves another fragment, so that no contribution waits for its own predecessor.
    """
    return min(fragments - 1, MAX_AHEAD)


def round_deadline_s(
    body_bytes: int, slowest_mbit_s: float, stall_s: float, *, before: int = 0
) -> float:
    """Return the limit of a reduction: eight times the slowest member's transfer, and ten stalls.

    Both legs of the slowest link carry at most the whole vector; eight leaves room for a
    measured rate that is four times too high. The reductions of the `before` positions that are
    not decided yet go first, so each of them adds as much.
    """
    transfer_s = 8 * body_bytes / (max(slowest_mbit_s, 0.1) * 1e6)
    return (8 * transfer_s + 10 * stall_s) * (1 + before)


def slowest_mbit_s(uplinks_mbit_s: Sequence[float]) -> float:
    """Return the rate of the slowest member, as a group's deadline takes it.

    A declared rate counts no lower than a quarter of the median: otherwise one member that declares
    0 keeps a round open for hours. A member that really is that slow is left out of parts. Of an
    even number, half may declare too little, or too much: the higher one of the two in the middle
    counts as well, up to `HALF_MBIT_S`.
    """
    high = min(statistics.median_high(uplinks_mbit_s), HALF_MBIT_S)
    median = max(statistics.median_low(uplinks_mbit_s), high)
    return max(min(uplinks_mbit_s), median / MOST_BELOW_MEDIAN)


def is_slow(uplink_mbit_s: float, uplinks_mbit_s: Sequence[float]) -> bool:
    """Return whether a member declares a rate below a quarter of the group's median."""
    return uplink_mbit_s * MOST_BELOW_MEDIAN < statistics.median_low(uplinks_mbit_s)


def laggards(
    progress: Mapping[int, float],
    took_s: Mapping[int, float],
    *,
    waited_s: float,
    stall_s: float,
    lone_s: float,
) -> set[int]:
    """Return the senders of a part for which its owner waits no longer.

    A sender lags if less than a quarter of its cells have come after twice the time that the
    median of the other senders took, and no less than four stalls. Signs of life do not count. A
    sender without another beside it has `lone_s`: it may be the link of both that is slow.

    Args:
        progress: by sender, the fraction of its cells that has come.
        took_s: by sender whose cells are all here, how long they took.
        waited_s: since the owner began to wait.
        stall_s: of the run.
        lone_s: the time of a lone sender, in which the slowest rate that counts brings a vector.
    """
    lagging = set()
    for member, sent in progress.items():
        others = [took_s.get(other, math.inf) for other in progress if other != member]
        if member in took_s or sent * MOST_BELOW_MEDIAN >= 1:
            continue
        limit_s = 2 * statistics.median_high(others) if others else lone_s
        if waited_s >= max(MARGIN_STALLS * stall_s, limit_s):
            lagging.add(member)
    return lagging


def exchange_mbit_s(own_mbit_s: float, theirs_mbit_s: float) -> float:
    """Return the rate by which one side of a pairwise exchange computes its deadline.

    The partner's counts as at least a quarter of its own one, which it knows; a rate of 0 is none.
    """
    least = min(own_mbit_s, HALF_MBIT_S) / MOST_BELOW_MEDIAN
    return min(own_mbit_s, max(theirs_mbit_s or math.inf, least))


def group_patience_s(
    term: int, *, grace_s: float, stall_s: float, last_s: float, window_s: float
) -> float:
    """Return how long a member waits for a term's group, whatever signs of life the leader sends.

    It is as long as an honest leader may take (`close_decision`): three graces for a quorum, as
    long again as the first peer's window or the last position took, and the grace; and some
    stalls for what is on its way. The leader of a later term first waits until it is called,
    and asks for promises.

    Args:
        term: of the position.
        grace_s: of the run.
        stall_s: of the run.
        last_s: how long the last position was next, of those decided by their first ballots.
        window_s: how long this member's contribution took since then.
    """
    call_s = ALONE_GRACES * grace_s + POLL_STALLS * stall_s if term else 0.0
    return call_s + (ALONE_GRACES + 1) * grace_s + max(last_s, window_s) + MARGIN_STALLS * stall_s


def term_time_s(term: int, *, grace_s: float, stall_s: float, last_s: float) -> float:
    """Return how long an acceptor that expects liars leaves a term before it promises the next.

    Members wait as long for the term's group if their windows are no longer than the last position
    took, so a silent leader costs no more than their patience. An honest one decides meanwhile: the
    last position took a window and a reduction, and the graces are left over.
    """
    return group_patience_s(term, grace_s=grace_s, stall_s=stall_s, last_s=last_s, window_s=0.0)


def agreed_silent(
    electorate: Sequence[Elector],
    silent: Collection[str],
    heard: Mapping[str, Collection[str]],
    trust: Trust,
) -> frozenset[str]:
    """Return which of the electors that a leader does not hear an entry may drop.

    A quorum says that it hears none of them. It will vote for that entry even if they are back by
    then, so whoever has to propose it again finds votes. One that hears them, or says so, does not
    keep them; if quorums are silent about each but not about all, they stay unless nobody hears
    them.

    Args:
        electorate: of the position.
        silent: PeerIDs of those that the leader does not hear.
        heard: which of them another one hears, by PeerID of those that answered; the leader's own
            acceptor is one of them.
        trust: what the run withstands.
    """

    def are_silent(peers: Collection[str]) -> bool:
        agree = [
            index
            for index, elector in enumerate(electorate)
            if elector.peer_id in heard and not {*peers} & {*heard[elector.peer_id]}
        ]
        return is_quorum(agree, len(electorate), trust)

    to_most = frozenset(peer for peer in silent if are_silent([peer]))
    to_all = to_most.difference(*heard.values())
    return next((peers for peers in (to_most, to_all) if are_silent(peers)), frozenset())


def decision_patience_s(deadline_s: float, stall_s: float) -> float:
    """Return how long a member waits for a decision from its group on: for reduction and votes."""
    return 2 * deadline_s + MARGIN_STALLS * stall_s


def new_owner(dead: Collection[int], alive: Sequence[int], load: Mapping[int, int]) -> int | None:
    """Return the owner with the fewest cells, the first of equals; None when no member is left.

    A survivor that owns nothing comes last: its link may be slow, or others may not dial it.

    Args:
        dead: members that are no candidates.
        alive: members that are.
        load: cells by member; none of those that own no part.
    """
    survivors = [index for index in alive if index not in dead]
    candidates = [index for index in survivors if index in load] or survivors
    return min(candidates, key=lambda i: (load.get(i, 0), i), default=None)
