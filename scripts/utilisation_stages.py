#!/usr/bin/env python3
"""Time the stages of a round on a peer's processor: one process, one thread, no network.

    utilisation_stages.py --methods diloco "sparseloco(merge=select, tau=32)" --json

The worker does not train: noise changes its parameters. The other members' frames come from other
noise. The stages are those of a real round, with the same classes; the rest of a round (messages,
votes, the log, waiting) is only in `bench utilisation`. Times are processor time, the minimum over
several rounds; the system's share of it is mostly for fresh pages.
"""

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `atoll` does
import torch
from torch import Tensor

from atoll.compression.sparse import Sparse
from atoll.coordinator.run.spec import RunSpec
from atoll.optim import inner
from atoll.optim.log.replay import Replay
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.cells import Bytes
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update, joined
from atoll.peer.lab.advice import as_run
from atoll.peer.lab.work import WEIGHT, received, reduced
from atoll.peer.rounds.allreduce.reduction import PartRange, batches
from atoll.peer.rounds.messages import PIECE_BYTES
from atoll.peer.training.opening import build_model

METHODS = ("sparseloco(merge=select, tau=32)", "diloco")
NOISE = 1e-3
INNER_STEPS = 32
VOCABULARY = 256  # of bytes


class Clock:
    """Processor seconds by stage: user and system."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, tuple[float, float]]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add a block's time to a stage of this round."""
        began_s, before = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
        yield
        after, took_s = resource.getrusage(resource.RUSAGE_THREAD), time.thread_time() - began_s
        user, system = self.rounds[-1].get(name, (0.0, 0.0))
        in_system_s = min(took_s, after.ru_stime - before.ru_stime)
        self.rounds[-1][name] = user + took_s - in_system_s, system + in_system_s

    def least_ms(self) -> dict[str, tuple[float, float]]:
        """Return total and system ms of the round in which a stage took least; skip the first."""
        least = {name: min((r[name] for r in self.rounds[1:]), key=sum) for name in self.rounds[1]}
        stages = {name: (1e3 * sum(times), 1e3 * times[1]) for name, times in least.items()}
        totals = (sum(ms for ms, _ in stages.values()), sum(ms for _, ms in stages.values()))
        return stages | {"together": totals}


class Alone:
    """A reducer that keeps what it is given."""

    position = 0

    def __init__(self, replay: Replay) -> None:
        self.fragments = replay.fragments
        self.handed_in: Contribution | None = None

    def start(self, layout: object, params_N: Tensor, settle: Settle) -> Tensor:
        self.settle = settle
        return params_N

    def submit(self, contribution: Contribution) -> None:
        self.handed_in = contribution

    def wait(self) -> None: ...


class Rounds:
    """One peer's work in rounds of `members` peers, of which it is the first."""

    def __init__(self, method: str, model: str, members: int) -> None:
        told = {"model": {"preset": model}} | as_run(method, INNER_STEPS)
        spec = RunSpec.from_dict(told)
        self.clock, self.model = Clock(), build_model(spec, VOCABULARY)
        layout = Layout.of(self.model)
        self.replay = Replay(spec.method(), layout)
        self.alone = Alone(self.replay)
        still = inner.build("sgd", self.model, lr=0.0)
        self.worker = self.replay.method.worker(
            self.model, still, self.alone, inner_steps=INNER_STEPS
        )
        self.state = self.replay.method.genesis(layout, self.worker.synced_N)
        self.cells, self.residual = self.replay.cells_at(0), self.replay.residual(0)
        self.noise = [NOISE * torch.randn(shape) for shape in layout.shapes]
        self.others = [self._frames_of_another() for _ in range(members - 1)]
        cuts = [len(self.cells) * part // members for part in range(members + 1)]
        self.parts = [
            PartRange(start_cell=start, stop_cell=stop, cells=self.cells)
            for start, stop in itertools.pairwise(cuts)
        ]

    def _frames_of_another(self) -> tuple[Bytes, ...]:
        other = self.replay.residual(0)
        return other.offer(NOISE * torch.randn(self.cells.numel), WEIGHT).frames

    def play(self) -> None:
        """Play one round."""
        self.clock.rounds.append({})
        stage = self.clock.stage
        self._train()
        assert self.alone.handed_in is not None, "a window has ended"
        with stage("encoder: contribution"):
            offer = self.residual.offer(self.alone.handed_in.delta, WEIGHT)
        frames = [offer.frames, *self.others]
        with stage("owner: add, average, encode"):
            owner = reduced(self.parts[0], frames)
        parts = [owner.decoded_N]
        for part in self.parts[1:]:
            theirs = reduced(part, frames)
            messages, done = list(batches(theirs.frames, PIECE_BYTES)), theirs.done(0, 0)[1]
            with stage("receiver: the other parts"):
                parts.append(received(part, messages, done, len(frames)))
        update = joined(parts)  # in a run they already lie so, or are sparse: 2 ms
        with stage("log: apply"):
            self.state = self._applied(update)
        included = torch.ones(len(self.cells), dtype=torch.bool)
        with stage("encoder: residual"):
            self.residual.settle(offer, included, weight=WEIGHT)
            if owner.credit_N is not None:
                self.residual.owner_credit(self.parts[0].values, owner.credit_N)
        commit = Commit(
            fragment=0,
            position=self.state.position,
            params_N=self.state.params_N,
            included=included,
            members=len(frames),
        )
        with stage("trainer: copies"):
            self.alone.settle(commit)

    def _applied(self, update: Update) -> OuterState:
        method, lr_momentum = self.replay.method, self.replay.method.scalars(1e-3)
        apply = method.apply_sparse if isinstance(update, Sparse) else method.apply
        scalars = dict(zip(("lr", "momentum"), lr_momentum, strict=True))
        return apply(self.state, update, fragment=self.cells.fragment, **scalars)

    def _train(self) -> None:
        """Train a window of steps, of which the first changes all parameters."""
        with torch.no_grad():
            for param, noise in zip(self.model.parameters(), self.noise, strict=True):
                param.add_(noise)
        for _ in range(INNER_STEPS):
            with self.clock.stage("trainer: copies"):
                self.worker.advance(tokens=1, loss=2.0)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add("--methods", nargs="*", default=METHODS, metavar="SPEC", help="methods to time")
    add("--model", default="30m", help="preset of RUN.toml (default 30m)")
    add("--members", type=int, default=4, help="members of a round (default %(default)s)")
    add(
        "--rounds",
        type=int,
        default=4,
        help="number of rounds, of which the first does not count (default 4)",
    )
    add("--json", action="store_true", help="print the milliseconds as JSON on the last line")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    found = {}
    for method in options.methods:
        rounds = Rounds(method, options.model, options.members)
        with torch.inference_mode():  # as in the threads of a round
            for _ in range(options.rounds):
                rounds.play()
        found[method] = rounds.clock.least_ms()
        print(f"{method}, {rounds.cells.numel:,} values, {options.members} members")
        for name, (ms, system_ms) in found[method].items():
            print(f"  {name:30}{ms:8.1f} ms, of which system {system_ms:6.1f}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
