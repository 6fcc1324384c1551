"""A networked reducer between two threads, and what it is given."""

import math
import threading
import types
from contextlib import nullcontext

import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.entry import Elector, Entry, Member, Part, sha256
from atoll.optim.log.live_replica import Applied
from atoll.optim.log.orders import RunSettings
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LogStore
from atoll.optim.reducer import Contribution
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.decisions import Decisions
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.reducer import NetworkReducer, TrainerProgress
from atoll.peer.daemon.tally import RoundTally
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.engine import Settled

NUMEL = CELL + 100  # two cells
LAYOUT = Layout(names=("w",), shapes=((NUMEL,),))
ME = Elector(peer_id="me", incarnation="1")
OTHER = Elector(peer_id="other", incarnation="1")
SPEC = RunSpec.from_dict({"compression": {"codec": "fp32"}})
NORM = math.sqrt(NUMEL)  # of a contribution of ones
TWO_ROUNDS = RunSpec.from_dict({"compression": {"codec": "fp32"}, "run": {"rounds": 2}})


def state(position):
    return OuterState.genesis(LAYOUT, torch.full((NUMEL,), float(position))).at(position)


def entry(position, *members):
    """An update with these members, or NULL without any."""
    part = Part(start_cell=0, stop_cell=2, owner=0, generation=0, wire_bytes=1, digest=sha256(b"x"))
    return Entry(
        run_id=bytes(32),
        epoch=0,
        position=position,
        kind="update" if members else "null",
        previous_chain=bytes(32),
        fragment=0,
        lr=1.0,
        momentum=0.0,
        members=tuple(
            Member(
                peer_id=m.peer_id,
                incarnation=m.incarnation,
                weight=10.0,
                clip=1.0,
                norm=NORM,
                tokens=100,
                steps=10,
                loss=2.0,
            )
            for m in members
        ),
        parts=(part,) if members else (),
        electorate=members or (OTHER,),
    )


def keep_entries(store, entries):
    for each in entries:
        store.append(
            epoch=0,
            position=each.position,
            entry=each.encode(),
            certificate=b"",
            body=b"",
            chain=each.chain,
        )


def decided(position, *members, settles=None, included=None, credits=()):
    applied = Applied(entry=entry(position, *members), state=state(position + 1), apply_s=0.0)
    return Settled(applied=applied, included=included, settles=settles, credits=list(credits))


def contribution(window=0, *, tokens=100, steps=10, loss=2.0, value=1.0):
    return Contribution(
        window=window,
        delta=torch.full((NUMEL,), value),
        tokens=tokens,
        steps=steps,
        loss=loss,
    )


def of_fragment(fragment, value=1.0):
    numel = (CELL, 100)[fragment]
    return Contribution(
        fragment=fragment,
        window=0,
        delta=torch.full((numel,), value),
        tokens=100,
        steps=10,
        loss=2.0,
    )


class Bench:
    """A reducer, its loop, and what it told both sides."""

    def __init__(
        self,
        folder,
        *,
        position=0,
        patience_s=30.0,
        hidden_s=30.0,
        spec=SPEC,
        layout=LAYOUT,
        company=None,
    ):
        self.folder, self.layout = folder, layout
        self.store = LogStore(folder, run_id=bytes(32), genesis_chain=bytes(32))
        self.replica = types.SimpleNamespace(
            settings=RunSettings(),
            layout=layout,
            replay=Replay(spec.method(), layout),
            state=state(position),
            store=self.store,
        )
        self.offers, self.commits, self.said = [], [], []
        self.offered = threading.Event()
        self.thread = LoopThread(nullcontext())
        self.decisions = Decisions()
        replay = self.replica.replay
        self.reducer = NetworkReducer(
            self.thread,
            types.SimpleNamespace(
                me=ME,
                replica=self.replica,
                replay=replay,
                on_event=lambda level, text, key=None: self.said.append(text),
            ),
            types.SimpleNamespace(offer=self.take),
            TrainerProgress(
                spec,
                replay.method,
                len(replay.fragments),
                ahead=lambda: self.replica.settings.course,
            ),
            self.decisions,
            patience_s=patience_s,
            hidden_s=hidden_s,
            company=company,
        )
        self.thread.value = self._peer()

    def _peer(self):
        """The peer of that reducer, as far as its network side asks."""
        run = types.SimpleNamespace(
            progress=self.reducer.progress,
            reducer=lambda thread: self.reducer,
            reporter=types.SimpleNamespace(tally=RoundTally()),
            expect_working=self.decisions.expect_none_failed,
        )
        return types.SimpleNamespace(
            run=run,
            spec=self.reducer.spec,
            peer_id=ME.peer_id,
            paths=PeerPaths(root=self.folder),
            module="",
            is_keeper=False,
            position=self.replica.state.position,
        )

    def deliver(self, settled):
        """Decide something, as the loop does."""
        self.decisions.put(settled)

    def take(self, window):
        self.offers.append(window)
        self.offered.set()

    def start(self):
        return self.reducer.start(self.layout, torch.zeros(NUMEL), self.commits.append)

    def submit(self, *arguments, **changes):
        self.offered.clear()
        self.reducer.submit(contribution(*arguments, **changes))
        assert self.offered.wait(10)
        return self.offers[-1]

    def submit_fragment(self, fragment):
        self.reducer.submit(of_fragment(fragment))
        self.reducer._encoder.submit(int).result(10)
        self.let_loop_catch_up()

    def let_loop_catch_up(self):
        self.reducer._encoder.submit(int).result(10)
        self.thread.ask(int)

    def residual(self):
        return self.reducer.state_dict()["feedback"][0]["mass_N"]

    def close(self):
        self.thread.close()
        self.store.close()
