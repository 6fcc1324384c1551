"""Taking part in a pipeline: the log of one module, and the microbatches that flow through it.

    PipelineRun    a `LogRun` of the peer's own stage, with a `Carrier` to the stages beside it

The flow begins once the trainer is there (`open_stage`), which knows the shape of the model.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.text import size
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import together
from atoll.peer import notices
from atoll.peer.daemon.background import background_threads
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.options import StageMove
from atoll.peer.daemon.peer import Environment, Peer
from atoll.peer.daemon.placing import VACANT_LOOK_S, Placing
from atoll.peer.daemon.reducer import NetworkReducer
from atoll.peer.errors import ModelError
from atoll.peer.inference.choice import serves
from atoll.peer.inference.served import ServedStage
from atoll.peer.inference.server import TextServer
from atoll.peer.pipeline.carrier import Carrier
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.ledger import SHARE
from atoll.peer.pipeline.messages import FrameShape
from atoll.peer.pipeline.passes import HopRules
from atoll.peer.pipeline.placement import StageNeeds
from atoll.peer.pipeline.tallies import HopStatistics
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.stage_learner import codecs_of
from atoll.peer.training.stages import Shape

DRAIN_S = 6.0  # the others read the roster each 2 s, and a record each 5 s
LOOK_S = 1.0  # between two looks for peers of the next stage; their records change each 5 s


class PipelineRun(LogRun):
    """A peer's part in a pipeline; a `RunKind`."""

    def __init__(self, env: Environment, joined: Joined | None) -> None:
        """Build everything; `start` also gives it a state."""
        super().__init__(env, joined)
        self.reporter.watch_flow(self.flow)
        self.bench = Workbench()
        """The jobs of the trainer."""
        self._stage = env.spec.modules.index(env.module)
        self._needs: tuple[StageNeeds, ...] = ()
        self._device_bytes = 0
        """until there is a trainer"""
        self._placing = Placing(
            env.spec.modules,
            env.me,
            env.module,
            rebalance_s=env.spec.topology.rebalance_s,
            moved=env.options.moved,
        )
        self.moves: StageMove | None = None
        """The move for which this peer leaves its stage."""
        self.on_move: Callable[[], None] = lambda: None
        """Called in the loop when this peer shall leave its stage."""
        self._carrier: Carrier | None = None
        self._texts: TextServer | None = None
        self._thread: LoopThread[Peer] | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether all rounds of all stages are committed; in any thread.

        The coordinator says so; if it is away, the peers' records do.
        """
        if self.publisher.is_complete:
            return True
        seen = self._env.neighbours.roster.seen
        rounds = self.progress.ahead().rounds(self._env.spec.run.rounds)
        done = {each.module for each in seen if 0 < rounds <= each.position}
        return done >= set(self._env.spec.modules)

    def reducer(self, thread: LoopThread[Peer]) -> NetworkReducer:
        """Return the trainer's side."""
        self._thread = thread
        return super().reducer(thread)

    def open_stage(self, shape: Shape, needs: Sequence[StageNeeds], device_bytes: int) -> None:
        """Take passes from now on; called by the trainer, once it is built.

        Args:
            shape: of the model.
            needs: of the run's stages.
            device_bytes: memory of the device that holds a stage.
        """
        assert self._thread is not None  # the trainer has a reducer
        self._device_bytes = device_bytes
        self._thread.ask(lambda: self._open(shape, needs))

    def _open(self, shape: Shape, needs: Sequence[StageNeeds]) -> None:
        env = self._env
        self._needs = tuple(needs)
        frames = frame_shape(env.spec, shape)
        hop = Hop(
            me=env.me.peer_id,
            incarnation=env.me.incarnation,
            stage=self._stage,
            rules=hop_rules(env.spec, frames),
            rng=random.SystemRandom(),
        )
        self._carrier = Carrier(
            hop,
            env.node.transport,
            frames,
            bench=self.bench,
            tasks=env.tasks,
            compute=env.compute,
            turn=self.ctx.link.pacer.turn,
            on_event=env.report,
        )
        env.tasks.keep(self._carrier.keep)
        env.tasks.spawn(self.publish)  # others send once they know that it serves

    def serve_texts(self, stage: ServedStage, share: float) -> None:
        """Compute texts of clients from now on, with the synced parameters; called by the trainer.

        Args:
            stage: this peer's, of its own.
            share: of the time.
        """
        assert self._thread is not None  # the trainer has a reducer
        self._thread.ask(lambda: self._open_texts(stage, share))

    def _open_texts(self, stage: ServedStage, share: float) -> None:
        env = self._env
        threads = background_threads(1, "atoll-text")
        env.files.callback(threads.shutdown, wait=False, cancel_futures=True)
        self._texts = TextServer(
            stage,
            lambda: (self.replica.state.position, self.replica.state.params_N),
            self.ctx.transport,
            share=share,
            tasks=env.tasks,
            compute=partial(asyncio.get_running_loop().run_in_executor, threads),
        )

    def flow(self) -> HopStatistics | None:
        """Return what has flowed through this peer; None before there is a trainer."""
        return self._carrier.hop.statistics() if self._carrier is not None else None

    async def run(self) -> None:
        """Hold rounds, and look for the peers of the next stage."""
        await together(
            super().run(),
            self.ctx.link.attend(self.ctx.transport),
            self._keep_looking(),
            self._keep_placing(),
        )

    async def publish(self) -> None:
        """Put this peer's record into the roster, with its place in the pipeline."""
        view = self.progress.view()
        module, place = self._placing.place(
            is_serving=self.progress.started,  # else it fetches a state, or builds its trainer
            tokens_per_s=view.able_tokens_per_s,
            download_mbit_s=self.reporter.download_mbit_s,
            device_bytes=self._device_bytes,
            needs=self._needs,
            now_s=time.monotonic(),
        )
        await self._env.neighbours.publish(
            self.epoch, self.position, view, module=module, place=place
        )

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Return the peers of this stage and of those beside it, as far as they were seen."""
        beside = self._env.spec.modules[max(0, self._stage - 1) : self._stage + 2]
        seen = self._env.neighbours.roster.seen
        own = await super().roster_peers()
        return own | {each.peer_id: each for each in seen if each.module in beside}

    async def hand_over(self) -> None:
        """Give up what is in work, so that others take it over, and resign."""
        withdrawal = [] if self._carrier is None else [self._carrier.withdraw()]
        await together(*withdrawal, super().hand_over())

    async def leave(self) -> None:
        """Close the rounds."""
        if self.moves is not None:  # its record says where it goes, until the next one does
            self._env.node.roster.stay()
        await super().leave()

    async def _keep_placing(self) -> None:
        """Move to another stage once the run needs this peer there."""
        while self.moves is None:
            await asyncio.sleep(VACANT_LOOK_S)
            if not self._may_move:
                continue
            seen = self._env.neighbours.roster.seen
            target = self._placing.look(self._needs, seen, time.monotonic())
            if target is not None:
                await self._set_out(target)

    @property
    def _may_move(self) -> bool:
        """Return whether this peer could ask the coordinator to let it join another stage."""
        has_begun = self.replica.opened is not None and bool(self._needs)
        is_over = self.progress.is_over(self.position) or self.progress.leaving
        return has_begun and not is_over and self.heartbeats.in_touch

    async def _set_out(self, target: str) -> None:
        """Announce a move, finish what is in work, and let the trainer end.

        A stage without peers is filled at once: the returns of what is in work may never come, and
        the others hand over to another peer what this one gives up.
        """
        moves = notices.stage_moves(from_module=self._env.module, to_module=target)
        self._env.report("info", moves)
        self.moves = StageMove(module=target, came_from=self._env.module)
        await self.publish()
        if self._carrier is not None and not self._placing.fills_vacant:
            self._carrier.act(self._carrier.hop.drain(asyncio.get_running_loop().time()))
            await asyncio.sleep(DRAIN_S)  # until the others have read the record, and returned
        self.on_move()

    async def _keep_looking(self) -> None:
        following = self._env.spec.modules[self._stage + 1 : self._stage + 2]
        while True:
            if self._carrier is not None:
                seen = self._env.neighbours.roster.seen
                self._carrier.look(
                    [each for each in seen if serves(each, following)],
                    [each for each in seen if _has_left(each, following)],
                )
            await asyncio.sleep(LOOK_S)


def _has_left(record: PeerRecord, modules: Sequence[str]) -> bool:
    """Return whether a peer is on its way from one of these modules to another."""
    place = record.place
    return place is not None and place.duty == "moving" and place.came_from in modules


def frame_shape(spec: RunSpec, shape: Shape) -> FrameShape:
    """Return what frames of a run look like."""
    codecs = codecs_of(spec)
    return FrameShape(
        max_rows=spec.inner.batch_size * spec.data.seq_len,
        max_length=spec.data.seq_len,
        width=shape.width,
        vocab_size=shape.vocab_size,
        forward_codec=codecs.forward.spec,
        backward_codec=codecs.backward.spec,
        forward_bytes=codecs.forward.frame_bytes,
        backward_bytes=codecs.backward.frame_bytes,
    )


def hop_rules(spec: RunSpec, frames: FrameShape) -> HopRules:
    """Return the rules of a run's hops. A step has as many microbatches as it accumulates.

    Raises:
        ModelError: a microbatch is larger than what a peer keeps of one origin.
    """
    rules = HopRules(
        stages=spec.topology.num_stages,
        shape=frames,
        lifetime_s=spec.topology.deadline_s,
        step_microbatches=spec.inner.grad_accumulation,
        staleness=spec.topology.staleness,
        exact=spec.topology.exact,
    )
    held_bytes = frames.held_bytes(frames.max_rows, spec.inner.batch_size)
    most_bytes = int(SHARE * rules.max_bytes)
    if held_bytes > most_bytes:  # no peer would ever take it
        raise ModelError(
            f"expected microbatches of which a peer keeps at most {size(most_bytes)}, got "
            f"{size(held_bytes)}: {spec.inner.batch_size} x {spec.data.seq_len} tokens of width "
            f"{frames.width}; set a smaller inner.batch_size, or coarser codecs in [topology]"
        )
    return rules
