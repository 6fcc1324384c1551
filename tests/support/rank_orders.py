"""What the ranks of a peer do when orders change the run; see `support.rank_work`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

from atoll.optim.log.live_replica import Applied
from atoll.optim.log.orders import RunSettings
from atoll.optim.ranks import RankReducer, Ranks
from atoll.peer.rounds.engine import Settled
from atoll.peer.training.ranks import SeveralRanks
from support.rank_work import vector_step, vector_worker
from support.reducer_bench import CELL, ME, Bench, decided, entry, state

CODEC = RunSettings(number=1, codec="int4")
REDUCER = CODEC.model_copy(update={"number": 2, "reducer": "median"})
SHORTER = REDUCER.model_copy(update={"number": 3, "inner_steps": 1})
LOST = [(slice(0, CELL + 50), torch.linspace(0.0, 3.0, CELL + 50))]
"""what this peer's encoding of its part lost: of the first rank's values, and of some others"""


def settled(position: int, settings: RunSettings, *, settles: int | None = None) -> Settled:
    """A control entry that brings settings."""
    control = entry(position).model_copy(
        update={"kind": "control", "order": b"x", "settings": settings.stored}
    )
    applied = Applied(entry=control, state=state(position + 1), apply_s=0.0)
    return Settled(applied=applied, included=None, settles=settles)


def update(position: int, settles: int, settings: RunSettings, credits: Sequence = ()) -> Settled:
    """An update with this peer's contribution."""
    made = decided(position, ME, settles=settles, included=[True, True], credits=credits)
    carries = made.applied.entry.model_copy(update={"settings": settings.stored})
    made.applied = Applied(entry=carries, state=made.applied.state, apply_s=0.0)
    return made


def windows() -> Iterator[tuple[int, RunSettings, list[Settled]]]:
    """Steps of each window, the log's settings when it ends, and what is decided of it."""
    begun = RunSettings()
    yield 2, begun, [update(0, 1, begun, LOST)]
    yield 2, CODEC, [settled(1, CODEC, settles=2)]  # encoded in the codec of before: given up
    yield 2, CODEC, [update(2, 3, CODEC, LOST)]
    yield 2, REDUCER, [settled(3, REDUCER), update(4, 4, REDUCER)]  # offered again, and in
    yield 2, SHORTER, [settled(5, SHORTER), update(6, 5, SHORTER)]
    yield 1, SHORTER, [update(7, 6, SHORTER)]


def orders_beside_one_process(folder: Path) -> None:
    """Follow orders on all ranks at the same position, with the frames of one process."""
    ranks = SeveralRanks(Ranks(timeout_s=60))
    bench = Bench(folder / f"log-{ranks.rank}", patience_s=10.0)
    alone = Bench(folder / f"alone-{ranks.rank}", patience_s=10.0)
    with closing(bench), closing(alone):
        reducer = RankReducer(ranks.ranks, lambda: bench.reducer)
        ours = vector_worker(reducer)
        # One process, which is in no group, is the reference; only the first rank has one.
        twin = vector_worker(alone.reducer, cut=False) if ranks.leads else None
        for steps, settings, decisions in windows():
            for each in (bench, alone):
                each.replica.settings = settings
                for decision in decisions:
                    each.deliver(decision)
            for worker in filter(None, (ours, twin)):  # as a trainer does after each commit
                worker.resize(reducer.course.window(2))
            for _ in range(steps):
                vector_step(ours)
                if twin is not None:
                    vector_step(twin, tokens=100 * ranks.size)
            course, codec = asdict(reducer.course), reducer._feedback[0].codec.spec
            found = ranks.gathered([reducer.position, course, codec])
            if twin is not None:
                expected = alone.reducer
                assert reducer.course == expected.course == settings.course
                codec = settings.codec or "fp32"
                assert found == [[expected.position, asdict(expected.course), codec]] * ranks.size
                compare_offers(bench, alone)
        if twin is not None:
            numbers = [window.number for window in bench.offers]
            assert numbers == [1, 3, 4, 5, 6], numbers  # the second was given up
            compare_residuals(alone, reducer)
        else:
            reducer.state_dict()


def compare_offers(bench: Bench, alone: Bench) -> None:
    """The same windows were offered, in the same bytes."""
    for each in (bench, alone):
        each.let_loop_catch_up()
    assert len(bench.offers) == len(alone.offers)
    for one, other in zip(bench.offers, alone.offers, strict=True):
        assert (one.number, one.codec, one.steps) == (other.number, other.codec, other.steps)
        assert one.offer.frames == other.offer.frames
        assert one.offer.weight == other.offer.weight


def compare_residuals(alone: Bench, reducer: RankReducer) -> None:
    """The first rank's range of the residual is the one process's."""
    reducer.state_dict()
    own = reducer.places.ranges[0][0].values
    assert torch.equal(reducer._feedback[0].mass_N, alone.residual()[own])
