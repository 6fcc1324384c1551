"""A follower in its event loop: a peer for each log that it follows, and what it makes of them.

A record in the roster, a heartbeat and a session name one module, because a peer serves one. So a
follower of a pipeline is several peers in one process, each an ordinary follower of one stage
(`FollowRun`), which share a folder, an owner and a process.

At first they begin one after another, so that fetched states are not in memory together; later, and
when they leave, all at once. Checkpoints are of all stages at one moment, as the coordinator's are.

Exceptions:

    ValueError
      CannotFollow     the run has no log, or not the stages that were named
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import Identity
from atoll.dht.tasks import together
from atoll.optim.state.mapped import is_on_disk
from atoll.peer.daemon.follow_exports import ExportOptions, Exports
from atoll.peer.daemon.follow_folder import FollowerFolder
from atoll.peer.daemon.follow_run import FollowRun
from atoll.peer.daemon.membership import Enrolment, FetchTokenizer, Membership, StateDirectory
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Environment, Peer, StartRun
from atoll.peer.paths import PeerPaths

MAX_PORT = 65535
_TCP_PORT = re.compile(r"(?<=/tcp/)[1-9][0-9]*", re.ASCII)

T = TypeVar("T")


class CannotFollow(ValueError):
    """The run has no log to follow, or not the stages that were named."""


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """What a follower's owner decides."""

    peer: PeerOptions
    stages: tuple[str, ...] = ()
    """Modules to follow, or their numbers; none: all."""
    state_on_disk: bool | None = None
    """Keep the states in mapped files; None: in a pipeline, whose model may fit no memory."""
    checkpoint_every: int | None = None
    """Rounds between two checkpoints; None: the run's own, 0: at the end alone."""
    exports: ExportOptions | None = None


def followed_modules(spec: RunSpec, stages: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the modules to follow, in the run's order.

    Args:
        spec: of the run.
        stages: names of modules or their numbers, as in the names; none: all.

    Raises:
        CannotFollow: the run has no log, or no such stage.
    """
    if spec.method().reduction == "pairs":
        raise CannotFollow(
            f"run {spec.run.name} has no log (its peers gossip), so there is nothing to follow; "
            "the coordinator keeps its newest model"
        )
    if stages and len(spec.modules) == 1:
        raise CannotFollow(
            f"--stages is for a pipeline, and run {spec.run.name} has one log; omit it"
        )
    chosen = {f"stage-{each}" if each.isdecimal() else each for each in stages}
    if unknown := sorted(chosen - set(spec.modules)):
        raise CannotFollow(
            f"--stages: expected stages of {', '.join(spec.modules)}, or their numbers, got "
            f"{unknown[0][:64]!r}"
        )
    return tuple(name for name in spec.modules if not chosen or name in chosen)


class Followed:
    """What a follower follows."""

    def __init__(self, spec: RunSpec, peers: Sequence[Peer], runs: Sequence[FollowRun]) -> None:
        """Use `open`."""
        self.spec = spec
        self.peers = tuple(peers)
        """One for each module, in the run's order."""
        self.runs = tuple(runs)
        self.has_written: Callable[[], bool] = lambda: True
        """Returns whether all checkpoints and exports that are due are written; in the loop."""

    @classmethod
    @asynccontextmanager
    async def open(cls, options: FollowOptions, on_event: Report) -> AsyncIterator[Followed]:
        """Join, hold verified states of all that is followed, and keep the run during the block.

        Raises:
            CannotFollow: the run has no log, or no such stage.
            ExportError: its exports are not allowed.
            StateDirectoryError, CoordinatorError, PortInUse: it cannot start with these options.
        """
        spec = await _spec_of(options.peer, on_event)
        modules = followed_modules(spec, options.stages)
        if options.exports is not None:
            options.exports.expect_allowed(spec, is_whole=modules == spec.modules)
        root = options.peer.state_dir
        with closing(FollowerFolder(root, options.peer.invite.run_id)) as folder:
            opening = _Opening(options, spec, folder, on_event)
            try:
                await opening.add_all(modules)
                async with opening.keeping(modules) as followed:
                    yield followed
            finally:
                await opening.close()

    @property
    def positions(self) -> tuple[int, ...]:
        """Entries applied, by module; in any thread."""
        return tuple(run.position for run in self.runs)

    @property
    def rounds(self) -> int:
        """The rounds of the run, which orders may change; 0 if it has no end; in any thread."""
        return min(run.progress.ahead().rounds(self.spec.run.rounds) for run in self.runs)

    @property
    def first_body(self) -> int:
        """The position from which every update is here, of all modules; in any thread."""
        return max(run.replica.store.first_with_bodies() for run in self.runs)

    @property
    def is_complete(self) -> bool:
        """Return whether all rounds are here, with the states after them; in any thread."""
        return all(run.is_complete for run in self.runs)

    def expect_working(self) -> None:
        """Raise the failure after which it follows no longer, if there is one."""
        for peer in self.peers:
            peer.run.expect_working()


class _Opening:
    """Opens the peers of a follower one after another, and closes them together."""

    def __init__(
        self, options: FollowOptions, spec: RunSpec, folder: FollowerFolder, on_event: Report
    ) -> None:
        self._options, self._spec, self._folder = options, spec, folder
        self._on_event = on_event
        self._held: dict[str, _KeptOpen[Peer]] = {}
        self._runs: dict[str, FollowRun] = {}
        self._look: Callable[[], None] = lambda: None
        self._me = ""
        """PeerID of the first peer."""

    async def add_all(self, modules: Sequence[str]) -> None:
        """Open the peers of these modules."""
        adding = [partial(self._add, number, module) for number, module in enumerate(modules)]
        if all(self._folder.files(module).has_log for module in modules):
            await together(*(add() for add in adding))  # each may wait for the coordinator
            return
        for add in adding:
            await add()

    async def _add(self, number: int, module: str) -> None:
        """Open the peer of a module, the one of this number."""

        async def start(env: Environment, joined: Joined | None) -> FollowRun:
            self._me = self._me or env.me.peer_id
            run = await FollowRun.start_keeping(env, joined, self._folder, lambda: self._look())
            self._runs[module] = run
            return run

        def kind(spec: RunSpec) -> StartRun:
            return start

        def note(level: Level, notice: Notice) -> None:
            self._note(level, notice.within(module))

        opening = Peer.open(
            self._peer_options(number, module),
            kind,
            admit=_admit,
            on_event=note,
            on_phase=lambda phase, position, left=None: None,
        )
        self._held[module] = await _KeptOpen.open(opening)

    @asynccontextmanager
    async def keeping(self, modules: Sequence[str]) -> AsyncIterator[Followed]:
        """Write checkpoints and exports during the block, and the last ones when it ends."""
        runs = [self._runs[module] for module in modules]
        followed = Followed(self._spec, [self._held[module].value for module in modules], runs)
        exports = Exports(self._options.exports, self._folder.root, self._spec, self._note)
        checkpoints = Checkpointing(
            _with_checkpoints(self._spec, self._options.checkpoint_every),
            {module: self._runs[module].replica for module in modules},
            {module: self._folder.files(module).checkpoints for module in modules},
            self._note,
            on_written=lambda paths: exports.look(paths, last=followed.is_complete),
        )

        def look() -> None:
            checkpoints.look(last=followed.is_complete)

        def has_written() -> bool:
            look()  # the last entry may have been applied just now
            return not checkpoints.is_writing and not exports.is_writing

        self._look, followed.has_written = look, has_written
        try:
            yield followed
        finally:
            self._look = lambda: None
            await exports.close()
            await checkpoints.close()

    async def close(self) -> None:
        """Leave with all peers at once; raise the first failure."""
        ends = (each.close() for each in self._held.values())
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure

    def _note(self, level: Level, notice: Notice) -> None:
        self._folder.keep_event(level, self._me, notice)
        self._on_event(level, notice)

    def _peer_options(self, number: int, module: str) -> PeerOptions:
        given, is_staged = self._options.peer, len(self._spec.modules) > 1
        on_disk = self._options.state_on_disk
        if on_disk is None:
            on_disk = is_staged and is_on_disk(given.state_dir)
        return replace(
            given,
            state_dir=self._folder.peer(module, is_first=number == 0),
            logs=given.state_dir,
            module=module,
            listen=tuple(port_after(each, number) for each in given.listen),
            announce=tuple(port_after(each, number) for each in given.announce),
            state_on_disk=on_disk,
        )


class _KeptOpen(Generic[T]):
    """A context that a task of its own holds open, so that several can end at once."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._hold(context))

    @classmethod
    async def open(cls, context: AbstractAsyncContextManager[T]) -> _KeptOpen[T]:
        """Enter the context; raise what that raises."""
        held = cls(context)
        try:
            ends: list[asyncio.Future[Any]] = [held._task, held._entered]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            held._task.cancel()
            await asyncio.wait({held._task})
            raise
        if not held._entered.done():
            held._task.result()  # raises why
        return held

    @property
    def value(self) -> T:
        """Return what the context gave."""
        return self._entered.result()

    async def close(self) -> None:
        """Leave the context; raise what that raises. Cancelling this cancels the context."""
        self._ending.set()
        await self._task

    async def _hold(self, context: AbstractAsyncContextManager[T]) -> None:
        async with context as value:
            self._entered.set_result(value)
            await self._ending.wait()


def port_after(multiaddr: str, number: int) -> str:
    """Return a multiaddr with a TCP port higher by a number; 0 stays any free port.

    Raises:
        CannotFollow: there is no such port.
    """

    def higher(found: re.Match[str]) -> str:
        port = int(found[0]) + number
        if port > MAX_PORT:
            raise CannotFollow(
                f"{multiaddr}: a follower of several stages takes a port for each, from this one "
                f"on; the highest is {MAX_PORT}, so name a lower one"
            )
        return str(port)

    return _TCP_PORT.sub(higher, multiaddr) if number else multiaddr


async def _spec_of(options: PeerOptions, on_event: Report) -> RunSpec:
    """Return the run's spec: as an earlier start has kept it, or by joining.

    Raises:
        StateDirectoryError, CoordinatorError: as `Peer.open` does.
    """
    paths, invite = PeerPaths(root=options.state_dir), options.invite

    def show(level: Level, notice: Notice, *, key: object = None) -> None:
        on_event(level, notice)

    with closing(StateDirectory(paths, invite.run_id)) as directory:
        directory.expect_role(follows=True)
        if (kept := directory.spec()) is not None:
            return kept
        identity = Identity.load_or_create(paths.identity)
        client = CoordinatorClient(invite, identity, role="follower", version=version("atoll"))
        try:
            enrolment, _ = await Enrolment.open(client, directory, invite, show)
        finally:
            await client.close()
    return enrolment.membership.spec


async def _admit(membership: Membership, fetch: FetchTokenizer) -> None:
    """Take part: what a run's owner could object to is no matter of a follower."""


def _with_checkpoints(spec: RunSpec, every: int | None) -> RunSpec:
    if every is None:
        return spec
    told = spec.model_dump(mode="json")
    told["coordinator"]["checkpoint_every"] = every
    return RunSpec.from_dict(told)
