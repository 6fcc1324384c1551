"""The peer as a process: its signals, its files, and the trainer's loop.

The trainer runs in the main thread, so that a signal ends it between two steps. The peer then
leaves the run, saves its state, and resumes from there at the next start. Its network is in a
process beside this one (`beside`), which has joined before it is known whether the peer trains the
whole model, a stage of it, or is a keeper, which only watches here.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from atoll.coordinator.notices import run_complete
from atoll.coordinator.run.levels import LOGGING, Level
from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.phases import RoundPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import TimeUse
from atoll.coordinator.run.text import CleanFormatter, count, loss_text, percent, size
from atoll.dht.identity import short
from atoll.optim.methods import MethodError
from atoll.optim.ranks import RankReducer
from atoll.optim.ranks.reducer import Led
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer import notices
from atoll.peer.daemon.beside.owner_side import OwnerSide
from atoll.peer.daemon.beside.trainer_side import NetworkLine, NetworkProcess, SeatReducer
from atoll.peer.daemon.consent import Ask, Consent, needs_of
from atoll.peer.daemon.options import PeerOptions, StageMove
from atoll.peer.daemon.shifts import Rule, Shifts
from atoll.peer.daemon.state_directory import delete_others, expect_run
from atoll.peer.daemon.tally import Account
from atoll.peer.daemon.views import RunFacts, TrainerView
from atoll.peer.errors import ModelError, SavedStateError, WrongRole
from atoll.peer.paths import PeerPaths
from atoll.peer.training.devices import Device, free_memory, gpu_memory
from atoll.peer.training.opening import (
    Opened,
    first_state,
    open_whole,
    slices_of,
    stage_needs,
)
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.ranks import OneRank, SeveralRanks, ranks_here
from atoll.peer.training.stage_learner import StageLearner
from atoll.peer.training.trainer import StageSeat, Trainer, TrainerOptions

OK, INTERRUPTED = 0, 128 + signal.SIGINT  # exit codes, as shells have them
STORED_S = 60.0  # at the end of a run: how long to wait for a coordinator that takes nothing
STORING_S = 3600.0  # and for one that takes entries: of 1 GB, at 2.2 Mbit/s
STORED_POLL_S = 0.1  # nobody notices so short a delay of the end
SAY_STORING_S = 2.0  # usually it is done by then
KEEP_POLL_S = 0.2  # how late a keeper's line about a round is
SAVE_EVERY_S = 60.0  # a killed process loses its last minute, or window, of inner state
VALIDATE_SHARE = 0.01  # of the time; trainers take turns, so a run has more of it
LOG_BYTES = 4 << 20
LOG_FILES = 3  # older ones: a peer that runs for months keeps 16 MiB of messages

_log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Decisions of a peer's owner."""

    peer: PeerOptions
    device: str = "auto"
    data: str | None = None
    """Path of the data on this machine; one that the spec names is not read."""
    tokenizer: str | None = None
    """Path of the tokenizer on this machine; one that the spec names is not read."""
    init: str | None = None
    """Folder of weights on this machine; one that the spec names is not read."""
    allow_models: frozenset[str] = frozenset()
    """Custom models that the spec may name, as `module:function`."""
    any_model_source: bool = False
    """Given by `--any-model-source`: accept a custom model of another source than the run's."""
    yes: bool = False
    """Given by `--yes`: agree to the run's demands without a question."""
    share: float = 1.0
    """Fraction of time to spend training; the rest is left to other programs."""
    serve: float = 0.0
    """Fraction of time to compute texts of others, in a pipeline; 0 serves none."""
    ranks: OneRank = field(default_factory=OneRank)
    """The processes that train as this peer; the first one joins the run."""
    rules: tuple[Rule, ...] = ()
    """When to train; between two shifts the peer has left the run."""

    @property
    def allowed(self) -> Allowed:
        """Return what the spec may name on this machine."""
        own = {path for path in (self.data, self.tokenizer, self.init) if path is not None}
        return Allowed(
            models=self.allow_models,
            files=frozenset(own),
            sent_tokenizer=self._sent_tokenizer,
            any_source=self.any_model_source,
        )

    def spec_with_own_files(self, spec: RunSpec) -> RunSpec:
        """Return a spec that names this machine's files."""
        return with_own_files(
            spec,
            data=self.data,
            tokenizer=self.tokenizer,
            init=self.init,
            sent_tokenizer=self._sent_tokenizer,
        )

    @property
    def _sent_tokenizer(self) -> Path:
        return PeerPaths(root=self.peer.state_dir).tokenizer


@dataclass(frozen=True, kw_only=True)
class PeerEvent:
    """Something that a program which runs a peer may want to know."""

    kind: Literal["event", "phase", "ready", "round", "stopped"]
    """A `round` is one that was decided; `ready` comes when a trainer or keeper begins."""
    position: int
    text: Notice
    level: Level = "info"
    phase: RoundPhase | None = None
    """The peer's new phase, in a `phase`."""
    left: int | None = None
    """Entries or leaves still to come, in a phase that fetches them."""
    account: Account | None = None
    """The outcome of a trainer's work, in a `round`."""
    tokens_per_s: float | None = None
    utilisation: float | None = None
    time_shares: Mapping[TimeUse, float] = field(default_factory=dict)
    """Fractions of the time by what the trainer did, over the last windows."""


OnPeerEvent = Callable[[PeerEvent], None]
"""Called in several threads."""


class Stop(threading.Event):
    """An event that also stops a trainer; set it from a signal handler or any thread."""

    def __init__(self) -> None:
        """Begin unset."""
        super().__init__()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """End after the step in progress."""
        super().set()
        for callback in list(self._callbacks):
            callback()

    def call(self, callback: Callable[[], None]) -> None:
        """Call something when this is set; at once if it is."""
        self._callbacks.append(callback)
        if self.is_set():
            callback()

    @contextmanager
    def part(self) -> Iterator[Stop]:
        """Yield one that ends a part of the work; setting this one sets it too.

        Afterwards this one keeps nothing of it: the callbacks of a stage hold its whole trainer.
        """
        part = Stop()
        self.call(part.set)
        try:
            yield part
        finally:
            self._callbacks.remove(part.set)


def run_peer(options: RunOptions, *, on_event: OnPeerEvent, ask: Ask | None = None) -> int:
    """Run a peer until its run is complete or a signal stops it; return the exit code.

    Args:
        options: options of the owner.
        on_event: takes what happens.
        ask: asks the owner to accept the run; None without a terminal.

    Raises:
        Exception: as `join_and_train`.
    """
    stop = Stop()
    with stop_on_signals(stop.set) as received, saying_that_it_stops(stop, on_event):
        train_in_shifts(options, on_event=on_event, stop=stop, ask=ask)
    return INTERRUPTED if signal.SIGINT in received else OK


def train_in_shifts(
    options: RunOptions, *, on_event: OnPeerEvent, stop: Stop, ask: Ask | None = None
) -> bool:
    """Train whenever the owner's rules allow it; return as `join_and_train`.

    Raises:
        Exception: as `join_and_train`.
    """
    tell = Narrator(on_event).tell
    shifts = Shifts(rules=options.rules, tell=partial(tell, "info"))
    while shifts.await_next(stop):
        with stop.part() as shift, shifts.watching(shift.set) as closed:
            is_over = join_and_train(options, on_event=on_event, stop=shift, ask=ask)
        if is_over or not closed.is_set():
            return is_over
        free_memory()
    return False


def join_and_train(
    options: RunOptions, *, on_event: OnPeerEvent, stop: Stop, ask: Ask | None = None
) -> bool:
    """Join, train, leave; return True if the run is complete, False if `stop` was set before.

    Raises:
        ConsentMissing, Declined: the owner has not agreed to what the run asks for.
        StateDirectoryError, CoordinatorError, SetupError: it cannot start with these options.
        TrainingFailed: it computes nothing but numbers that are not finite.
    """
    paths = PeerPaths(root=options.peer.state_dir)
    expect_run(paths, options.peer.invite.run_id)  # before a log file is written there
    narrator = Narrator(on_event)
    with log_file(paths):
        while True:
            # The state and the trainer of a stage that it left go before there are others.
            network: NetworkLine | None = None
            with stop.part() as stay:  # in one stage, if the run is a pipeline
                try:
                    owner = _owner(options, narrator, stay, ask)
                    network = _open(options, narrator, stay, owner)
                    narrator.follow(network)
                    with closing(network):
                        is_over = _take_part(options, network, owner, narrator, stay)
                    # The run may have been completed while the peer left its stage.
                    moves = None if network.view.is_complete else network.view.moves
                except KeyboardInterrupt:
                    if network is not None:
                        raise
                    return False
                except Exception as error:
                    moves, is_over = _way_back(options.peer.moved, network), False
                    if moves is None:
                        if network is not None:
                            narrator.emit("stopped", notices.stopped(reason=str(error)), "error")
                        raise
                    returns = notices.stage_returns(
                        from_module=moves.came_from, to_module=moves.module, reason=str(error)
                    )
                    narrator.tell("warning", returns)
            if moves is None or stop.is_set():
                narrator.emit("stopped", notices.stopped())
                return is_over
            # The same peer in another log: it leaves one cleanly, and recovers the other.
            options = replace(options, peer=replace(options.peer, moved=moves))
            narrator.forget_peer()


def _owner(options: RunOptions, narrator: Narrator, stop: Stop, ask: Ask | None) -> OwnerSide:
    """Return what answers for this machine."""
    consent = Consent(
        paths=PeerPaths(root=options.peer.state_dir),
        state_on_disk=options.peer.state_on_disk,
        gpu_bytes=gpu_memory(options.device, ranks=options.ranks.size),
        ranks=ranks_here() if options.ranks.size > 1 else 1,
        run_id=options.peer.invite.run_id,
        allowed=options.allowed,
        data=options.data,
        tokenizer=options.tokenizer,
        init=options.init,
        yes=options.yes,
        ask=ask,
        stopping=stop,
        show=lambda line: narrator.tell("info", notices.run_asks(line)),
    )

    def make_first(spec: RunSpec, module: str) -> OuterState:
        return first_state(options.spec_with_own_files(spec), options.allowed, module=module)

    def open_run(spec: RunSpec) -> Opened:
        device = Device.choose(options.device, spec.inner.precision)
        return open_whole(options.spec_with_own_files(spec), device, options.allowed)

    # Several ranks decide together how the model lies on their devices.
    return OwnerSide(consent, make_first, open_run if options.ranks.size == 1 else None)


def _open(options: RunOptions, narrator: Narrator, stop: Stop, owner: OwnerSide) -> NetworkLine:
    """Join and recover. Raises KeyboardInterrupt if `stop` is set meanwhile."""
    with options.ranks.leading():
        return NetworkProcess(
            options.peer,
            on_event=narrator.tell,
            on_phase=narrator.on_phase,
            stopping=stop,
            owner=owner,
        )


def _take_part(
    options: RunOptions, network: NetworkLine, owner: OwnerSide, narrator: Narrator, stop: Stop
) -> bool:
    """Train, or watch a keeper; return whether the run is complete."""
    facts = network.facts
    if options.ranks.size > 1 and facts.module:
        raise WrongRole(
            "a stage of a pipeline is trained by one process; start one peer a GPU, each with its "
            "own --state-dir, without --gpus and --ranks"
        )
    if not facts.is_keeper:
        return _train(options, SeatReducer(network), owner, narrator, stop)
    if options.ranks.size > 1:
        raise WrongRole(
            "the invite is for keepers, which do not train: start one process, without --gpus and "
            "--ranks"
        )
    return _keep(options, network, narrator, stop)


def _way_back(moved: StageMove | None, network: NetworkLine | None) -> StageMove | None:
    """Return the move back of a peer that could not begin to serve the stage that it moved to.

    None if it has not moved, or served already, or cannot serve the stage from which it came.
    """
    if moved is None or moved.has_failed or (network is not None and network.sees_trainer):
        return None
    return StageMove(module=moved.came_from, came_from=moved.module, has_failed=True)


def _keep(options: RunOptions, network: NetworkLine, narrator: Narrator, stop: Stop) -> bool:
    """Watch a keeper lead and vote, until the run is complete or `stop` is set."""
    spec = RunSpec.from_json(network.facts.spec)
    narrator.introduce_keeper(network, options.peer.name)
    while not stop.wait(KEEP_POLL_S):
        network.expect_working()
        rounds = network.view.course.rounds(spec.run.rounds)
        narrator.tell_round(network, rounds)
        if _is_over(spec, network):
            narrator.tell("info", run_complete(rounds=rounds))
            wait_until_stored(network, STORED_S, stop, narrator.tell)
            return True
    return False


def _train(
    options: RunOptions, reducer: SeatReducer, owner: OwnerSide, narrator: Narrator, stop: Stop
) -> bool:
    ranks, network, spec = options.ranks, reducer.network, reducer.spec
    facts = network.facts
    state_path = PeerPaths(root=options.peer.state_dir).trainer(facts.module)
    run = {
        "module": facts.module,
        "draws": facts.module == spec.modules[0],
        "spec": spec.canonical().decode(),
        "peer_id": facts.peer_id,
        "position": facts.position,
        "has_state": state_path.exists(),
    }
    if stop.is_set():  # the data of a run takes seconds to read
        ranks.agreed(None)
        return False
    run = ranks.agreed(run)
    spec = options.spec_with_own_files(spec)
    shared = _shared(reducer, ranks)
    opened = owner.take_opened()
    trainer = Trainer(
        spec,
        shared,
        _trainer_options(
            options,
            run,
            validates=reducer.validates,
            paces_s=reducer.paces_s,
            window_ends=reducer.window_ends,
            joins=reducer.joins,
            is_over=partial(_is_over, spec, network),
            stage=_seat(network),
        ),
        corpus=opened.corpus if opened is not None else None,
        model=opened.model if opened is not None else None,
        is_tried=opened is not None,
    )
    del opened  # the trainer alone decides how long it keeps them
    shared.encode_on(trainer.device.encodes_on)
    if isinstance(trainer.learner, StageLearner):
        network.on_view = lambda view: stop.set() if view.moves is not None else None
        _open_stage(options, network, spec, trainer, trainer.learner, narrator)
    elif options.serve:
        unused = notices.option_unused(
            option="--serve", reason="only peers of a pipeline serve texts"
        )
        narrator.tell("warning", unused)
    stop.call(trainer.stop)
    network.show(lambda: view_of(trainer))
    if facts.module:
        _leave_former(PeerPaths(root=options.peer.state_dir), spec, facts.module, narrator)
    if run["has_state"]:
        try:
            trainer.load(state_path)
            narrator.tell("info", notices.trainer_resumed())
        except SavedStateError as error:
            narrator.tell("warning", notices.trainer_fresh(reason=str(error)))
    if stop.is_set() and ranks.size == 1:
        return False
    for level, notice in trainer.remarks():
        narrator.tell(level, notice)
    narrator.introduce(network, spec, trainer, options.peer.name)
    trainer.run()
    if trainer.finished and not stop.is_set():
        rounds = trainer.rounds
        narrator.tell("info", run_complete(rounds=rounds))
        wait_until_stored(network, STORED_S, stop, narrator.tell)
    return trainer.finished


def _open_stage(
    options: RunOptions,
    network: NetworkLine,
    spec: RunSpec,
    trainer: Trainer,
    learner: StageLearner,
    narrator: Narrator,
) -> None:
    """Let microbatches flow through this peer's stage, and texts if the owner wishes."""
    shape = learner.model.shape
    known = slices_of(spec, shape.vocab_size, options.allowed)
    network.ask("open_stage", vars(shape), stage_needs(spec, known), trainer.device.memory_bytes)
    if not options.serve:
        return
    told = {
        "spec": spec.canonical(),
        "module": network.facts.module,
        "vocab_size": shape.vocab_size,
        "share": options.serve,
        "models": sorted(options.allowed.models),
        "any_source": options.allowed.any_source,
        "path": sys.path,
    }
    try:
        network.ask("serve_texts", told)
    except ModelError as error:  # a stage that cannot trains all the same
        narrator.tell("warning", notices.texts_not_served(reason=str(error)))
        return
    narrator.tell("info", notices.texts_served(share=options.serve))


def _leave_former(paths: PeerPaths, spec: RunSpec, module: str, narrator: Narrator) -> None:
    """Delete the files of other stages; until here a way back would have needed them.

    Else a peer that moves often would end with the whole model on its disk.
    """
    try:
        delete_others(paths, spec.modules, module)
    except OSError as error:
        narrator.tell("warning", notices.files_stay(reason=str(error)))


def _is_over(spec: RunSpec, network: NetworkLine) -> bool:
    """Return whether the run is complete for this peer; raise the failure that ends its part."""
    network.expect_working()  # a stage without microbatches asks for no round that would raise it
    view = network.view
    return 0 < view.course.rounds(spec.run.rounds) <= view.position


def _seat(network: NetworkLine) -> StageSeat | None:
    """Return the stage that a peer serves; None if it trains the whole model."""
    module = network.facts.module
    if not module:
        return None
    return StageSeat(
        module=module, bench=network.bench, is_complete=lambda: network.view.is_complete
    )


def _shared(reducer: SeatReducer, ranks: OneRank) -> SeatReducer | RankReducer:
    """Return what the trainer of the first rank takes for its reducer.

    Raises:
        MethodError: there are several ranks, and the run has no common state.
    """
    if not isinstance(ranks, SeveralRanks):
        return reducer
    if not reducer.method.logged:
        raise MethodError(
            f"several processes can't meet other peers in pairs, as {reducer.method.name} does; "
            "start one peer a GPU, each with its own --state-dir"
        )
    return RankReducer(ranks.ranks, lambda: reducer)


def follow(options: RunOptions) -> None:
    """Train as another rank than the first, which joins the run and decides when to stop.

    Raises:
        RanksError: the first rank has failed or is gone.
        SetupError: the data, model or device is not usable here.
    """
    ranks = options.ranks
    assert isinstance(ranks, SeveralRanks)
    run = ranks.agreed(None)
    if run is None:
        return
    spec = RunSpec.from_json(run["spec"].encode())
    reducer = RankReducer(ranks.ranks, _expect_first)
    trainer = Trainer(options.spec_with_own_files(spec), reducer, _trainer_options(options, run))
    reducer.encode_on(trainer.device.encodes_on)
    if run["has_state"]:
        with suppress(SavedStateError):  # the first rank reports it
            trainer.load(PeerPaths(root=options.peer.state_dir).trainer(run["module"]))
    trainer.run()


def _expect_first() -> Led:
    raise AssertionError("only the first rank joins")


def _trainer_options(
    options: RunOptions,
    run: Mapping[str, Any],
    **called: Any,  # noqa: ANN401 - of `TrainerOptions`
) -> TrainerOptions:
    """Return what all ranks of a peer train with, and what only the first one is asked."""
    return TrainerOptions(
        peer_id=run["peer_id"],
        device=options.device,
        position=run["position"],
        validate_every=1 if run["draws"] else 0,
        validate_share=VALIDATE_SHARE,
        state_path=PeerPaths(root=options.peer.state_dir).trainer(run["module"]),
        save_every_s=SAVE_EVERY_S,
        allowed=options.allowed,
        share=options.share,
        ranks=options.ranks,
        **called,
    )


class Narrator:
    """Turns what a peer and its trainer do into events; called in several threads."""

    def __init__(self, on_event: OnPeerEvent) -> None:
        """Pass events on; they are of position 0 until there is a peer to follow."""
        self._on_event = on_event
        self._network: NetworkLine | None = None
        self._position = 0
        """of the peer that was followed last"""
        self._told_round = 0

    def follow(self, network: NetworkLine) -> None:
        """Take the position of events from a peer."""
        self._network = network

    def forget_peer(self) -> None:
        """Keep nothing of a peer but its position."""
        assert self._network is not None
        self._position, self._network = self._network.view.position, None

    def introduce(self, network: NetworkLine, spec: RunSpec, trainer: Trainer, name: str) -> None:
        """Report that training begins, and from now on each round."""
        position, facts = network.view.position, network.facts
        network.on_account = partial(self.on_account, trainer)
        me = _named(name, facts)
        device, peers = trainer.statistics().device, spec.round.min_peers
        self.tell("info", joined_run(spec, trainer.worker.layout, position))
        if isinstance(trainer.learner, StageLearner):
            self.tell("info", serves(spec, facts.module, trainer.learner.model.indices))
        ready = notices.ready(me, device=device, round=position, min_peers=peers)
        self.emit("ready", ready)

    def introduce_keeper(self, network: NetworkLine, name: str) -> None:
        """Report that this peer leads and votes, and from now on each round."""
        self._told_round = network.view.position
        me = _named(name, network.facts)
        self.emit("ready", notices.keeper_ready(me))

    def tell_round(self, network: NetworkLine, rounds: int) -> None:
        """Report a keeper's newest round, if it is new; 0 rounds have no end."""
        position = network.view.position
        if position > self._told_round:
            self._told_round = position
            text = f"round {position}{f'/{rounds}' if rounds else ''}"
            self.emit("round", notices.round_decided(text))

    def tell(self, level: Level, notice: Notice) -> None:
        """Log an event and pass it on."""
        _log.log(LOGGING[level], notice)
        self.emit("event", notice, level)

    def on_phase(self, phase: RoundPhase, position: int, *, left: int | None = None) -> None:
        """Pass on a phase."""
        text = notices.phase_changed(phase)
        self._on_event(
            PeerEvent(kind="phase", position=position, text=text, phase=phase, left=left)
        )

    def on_account(self, trainer: Trainer, account: Account) -> None:
        """Report a round that was decided, and the outcome of this peer's work."""
        stats, rounds = trainer.statistics(), trainer.rounds
        used = stats.utilisation if stats.spent.total_s else None  # none before a second window
        text = (
            f"round {account.position}{f'/{rounds}' if rounds else ''}  "
            f"loss {loss_text(stats.loss)}  {stats.tokens_per_s:,.0f} tok/s  "
            f"util {percent(used, decimals=1)}  {account.verdict}"
        )
        self._on_event(
            PeerEvent(
                kind="round",
                position=account.position,
                text=notices.round_decided(text),
                account=account,
                tokens_per_s=_finite(stats.tokens_per_s),
                utilisation=used,
                time_shares=stats.spent.shares(),
            )
        )

    def emit(
        self,
        kind: Literal["event", "ready", "round", "stopped"],
        notice: Notice,
        level: Level = "info",
    ) -> None:
        """Pass on an event at the peer's position."""
        position = self._position if self._network is None else self._network.view.position
        self._on_event(PeerEvent(kind=kind, position=position, text=notice, level=level))


def _named(name: str, facts: RunFacts) -> str:
    return f"{name or 'this peer'} ({short(facts.peer_id)})"


def joined_run(spec: RunSpec, layout: Layout, position: int) -> Notice:
    """Return what a peer takes part in, and how much of it is left, as one line."""
    left, model, needs = spec.run.rounds - position, spec.model.title, needs_of(spec, layout)
    here = " in this stage" if spec.topology.num_stages > 1 else ""
    rounds = f"{left} of {spec.run.rounds} rounds left" if spec.run.rounds else "rounds without end"
    text = (
        f"run {spec.run.name}: {model} with {count(layout.numel)} parameters{here}, "
        f"{spec.outer.method} of {spec.outer.inner_steps} steps, data {spec.data.source}, "
        f"{rounds}; needs about {size(needs.host_memory(on_gpu=False))} of memory and "
        f"{size(needs.peer_disk)} of disk"
    )
    return notices.run_joined(
        text,
        run=spec.run.name,
        params=layout.numel,
        method=spec.outer.method,
        rounds_left=left if spec.run.rounds else None,
        memory_bytes=needs.host_memory(on_gpu=False),
        disk_bytes=needs.peer_disk,
    )


def serves(spec: RunSpec, module: str, slices: range) -> Notice:
    """Return which stage of a pipeline a peer serves, and the indices of its slices."""
    return notices.stage_serves(
        module=module, stages=spec.topology.num_stages, first=slices[0], last=slices[-1]
    )


class Stores(Protocol):
    """A peer as the giver of the last entries, which the coordinator may lack."""

    def stored_all(self) -> bool:
        """Return whether the coordinator has all that this peer has to give it."""
        ...

    def storing(self) -> bool:
        """Return whether some of it is on its way."""
        ...


def wait_until_stored(
    stores: Stores,
    timeout_s: float,
    stopping: threading.Event,
    tell: Report,
) -> bool:
    """Wait until the coordinator has all that a peer has to give it; return whether it has.

    Args:
        stores: gives it.
        timeout_s: the longest wait while nothing is on its way; a coordinator that is away may not
            come back. One that takes entries, or seems to, is waited for `STORING_S` at most.
        stopping: ends the wait, from another thread or a signal handler.
        tell: takes what the owner should know of a wait that lasts.
    """
    began_s = idle_since_s = time.monotonic()
    is_told = False
    while not stores.stored_all():
        now_s = time.monotonic()
        waited_s = now_s - began_s
        idle_since_s = now_s if stores.storing() else idle_since_s
        if now_s - idle_since_s > timeout_s or waited_s > STORING_S:
            tell("warning", notices.coordinator_not_stored())
            return False
        if waited_s > SAY_STORING_S and not is_told:
            is_told = True
            tell("info", notices.coordinator_storing(timeout_s=timeout_s))
        if stopping.wait(STORED_POLL_S):
            return False
    return True


def view_of(trainer: Trainer) -> TrainerView:
    """Return what a peer reports about its trainer."""
    stats, learner = trainer.statistics(), trainer.learner
    return TrainerView(
        ready_at_s=stats.ready_at_s,
        step_s=stats.pace_s,
        step=stats.step,
        inner_steps=stats.inner_steps,
        tokens=stats.tokens,
        tokens_per_s=stats.tokens_per_s,
        able_tokens_per_s=learner.tokens_per_s if isinstance(learner, StageLearner) else 0.0,
        loss=_finite(stats.loss),
        valid_loss=_finite(stats.valid_loss) if stats.valid_is_new else None,
        utilisation=stats.utilisation,
        time_shares=stats.spent.shares(),
        device=stats.device,
    )


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Stop cleanly on SIGINT or SIGTERM, at once on a second one; yield the signals received."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def saying_that_it_stops(stop: Stop, on_event: OnPeerEvent) -> Iterator[None]:
    """Report a stop at once: leaving takes seconds, in which people press Ctrl-C again.

    A thread does it, because a signal handler may interrupt another line.
    """
    woken, is_left = threading.Event(), threading.Event()

    def say() -> None:
        woken.wait()
        if not is_left.is_set():
            on_event(PeerEvent(kind="event", position=0, text=notices.stopping()))

    teller = threading.Thread(target=say, name="atoll-stop", daemon=True)
    teller.start()
    stop.call(woken.set)
    try:
        yield
    finally:
        if not stop.is_set():
            is_left.set()
        woken.set()
        teller.join()


@contextmanager
def log_file(paths: PeerPaths) -> Iterator[None]:
    """Write what is logged to the peer's file, with what asyncio logs about failed callbacks.

    Those would otherwise go to the terminal, where nobody can do anything about hivemind's tasks.
    """
    handler = RotatingFileHandler(
        paths.messages,
        maxBytes=LOG_BYTES,
        backupCount=LOG_FILES,
        encoding="utf-8",
        delay=True,  # until the first message: the directory exists, and is locked, by then
    )
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _log.setLevel(logging.INFO)
    loggers = (_log, logging.getLogger("asyncio"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def _finite(value: float) -> float | None:
    # A status is JSON without NaN: the coordinator would refuse all of it.
    return value if math.isfinite(value) else None
