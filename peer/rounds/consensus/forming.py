"""Forms a group of the reports that came: its members, its parts, its deadline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from atoll.peer.rounds.allreduce.exchange import expected_plan
from atoll.peer.rounds.consensus.ballots import Place
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Group, PartPlan, Ready, Report, Sworn
from atoll.peer.rounds.policies import (
    admit,
    kept_parts,
    may_own,
    round_deadline_s,
    slowest_mbit_s,
    split_cells,
)


def form_group(ctx: Context, place: Place, term: int, ready: Mapping[str, Ready]) -> Group:
    """The group of these members, in their order."""
    cells = ctx.replay.cells_at(place.position)
    stall_s = ctx.settings.stall_s
    reports = [(peer, one.report) for peer, one in ready.items()]
    return Group(
        epoch=place.epoch,
        position=place.position,
        term=term,
        members=tuple(
            admit(
                reports,
                clip_at=ctx.replay.method.clip_at,
                carried=ctx.carried_norm(place.position),
            )
        ),
        reports=tuple(
            Sworn(
                counts=one.report.weight > 0,
                uplink_mbit_s=one.report.uplink_mbit_s,
                signature=one.signature,
            )
            for one in ready.values()
        ),
        parts=tuple(_cut(ctx, place.position, ready)),
        stall_s=stall_s,
        deadline_s=round_deadline_s(
            cells.max_body_bytes(len(ready)),
            slowest_mbit_s([report.uplink_mbit_s for _, report in reports]),
            stall_s,
            before=max(0, place.position - ctx.replica.position),
        ),
    )


def _cut(ctx: Context, position: int, ready: Mapping[str, Ready]) -> Sequence[PartPlan]:
    """Cut the parts as the last entry did, if its owners are here and that is no worse."""
    sizes = ctx.replay.cells_at(position).sizes
    rates = [_rate_mbit_s(ctx, peer, one.report) for peer, one in ready.items()]
    can_own = _may_own(ctx, ready)
    best = split_cells(sizes, rates, can_own)
    expected = expected_plan(ctx, position)
    place = {
        peer: index for index, (peer, can) in enumerate(zip(ready, can_own, strict=True)) if can
    }
    if expected is None or not {part.owner for part in expected.parts} <= set(place):
        return best
    last = [
        PartPlan(start_cell=part.start_cell, stop_cell=part.stop_cell, owner=place[part.owner])
        for part in expected.parts
    ]
    even = split_cells(sizes, [1.0] * len(ready), can_own)
    turn = position // len(ctx.replay.fragments)
    return kept_parts(last, best, even, rates, turn=turn, megabits=8e-6 * sum(sizes))


def _may_own(ctx: Context, ready: Mapping[str, Ready]) -> list[bool]:
    records = (ctx.seen.get(peer) for peer in ready)
    is_dialed = [record is None or record.is_dialed for record in records]
    lags = [ctx.lags.barred(peer, ctx.now()) is not None for peer in ready]
    return may_own(is_dialed, [one.report.uplink_mbit_s for one in ready.values()], lags)


def _rate_mbit_s(ctx: Context, peer: str, report: Report) -> float:
    """Return the rate of the slower direction; a downlink counts only if it is declared."""
    record = ctx.seen.get(peer)
    downlink = record.downlink_mbit_s if record is not None else 0.0
    return min(report.uplink_mbit_s, downlink or math.inf)
