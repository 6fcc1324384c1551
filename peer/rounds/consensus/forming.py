"""The terms of a closing group: its members' weights and clip factors, parts and owners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from atoll.optim.log.entry import Member
from atoll.optim.reduction.weights import cap_weights, clip_factors
from atoll.peer.rounds.allreduce.upfront import expected_plan
from atoll.peer.rounds.consensus.ballot import Place
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Group, PartPlan, Ready
from atoll.peer.rounds.policies import kept_parts, round_deadline_s, split_cells


def form_group(ctx: Context, place: Place, term: int, ready: Mapping[str, Ready]) -> Group:
    """The group of these members, in their order."""
    cells = ctx.replay.cells_at(place.position)
    stall_s = ctx.settings.stall_s
    return Group(
        epoch=place.epoch,
        position=place.position,
        term=term,
        members=tuple(admit(list(ready.items()), clip_at=ctx.replay.method.clip_at)),
        parts=tuple(_cut(ctx, place.position, ready)),
        stall_s=stall_s,
        deadline_s=round_deadline_s(
            cells.max_body_bytes(len(ready)),
            min(report.uplink_mbit_s for report in ready.values()),
            stall_s,
            before=max(0, place.position - ctx.replica.position),
        ),
    )


def admit(ready: Sequence[tuple[str, Ready]], *, clip_at: float) -> list[Member]:
    """Members with their capped weights and clip factors; a bound of 0 clips nobody."""
    weights = cap_weights([r.weight for _, r in ready])
    steps = [max(r.steps, 1) for _, r in ready]
    clips = clip_factors([r.norm for _, r in ready], steps, at=clip_at or math.inf)
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
        )
        for (peer, r), weight, clip in zip(ready, weights, clips, strict=True)
    ]


def _cut(ctx: Context, position: int, ready: Mapping[str, Ready]) -> Sequence[PartPlan]:
    """Cut the parts as the last entry did, if its owners are here and that is no worse."""
    sizes = ctx.replay.cells_at(position).sizes
    rates = [_rate_mbit_s(ctx, peer, report) for peer, report in ready.items()]
    best = split_cells(sizes, rates)
    expected = expected_plan(ctx, position)
    place = {peer: index for index, peer in enumerate(ready)}
    if expected is None or not {part.owner for part in expected.parts} <= set(place):
        return best
    last = [
        PartPlan(start_cell=part.start_cell, stop_cell=part.stop_cell, owner=place[part.owner])
        for part in expected.parts
    ]
    even = split_cells(sizes, [1.0] * len(ready))
    turn = position // len(ctx.replay.fragments)
    return kept_parts(last, best, even, rates, turn=turn, megabits=8e-6 * sum(sizes))


def _rate_mbit_s(ctx: Context, peer: str, report: Ready) -> float:
    """Return the rate of the slower direction; a downlink counts only if it is declared."""
    record = ctx.seen.get(peer)
    downlink = record.downlink_mbit_s if record is not None else 0.0
    return min(report.uplink_mbit_s, downlink or math.inf)
