"""Text from a live pipeline, for `atoll sample INVITE`: joins as a follower, and asks the stages.

A follower trains nothing, votes for nothing and is in no roster: its admission lets it call peers.
It proves the same key at each use, so that an invite for a number of peers loses one place in all.
Two at once have different keys, as no two processes may have one PeerID.

    DenseRun (ValueError)    the run's peers hold the whole model: a checkpoint answers faster
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.addresses import usable
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.peer import notices
from atoll.peer.daemon.membership import StateDirectory
from atoll.peer.daemon.options import LISTEN, TEXT_WAIT_S
from atoll.peer.daemon.sent_tokenizer import keep_tokenizer
from atoll.peer.daemon.state_directory import StateDirectoryInUse
from atoll.peer.extras import extra
from atoll.peer.inference.client import LiveModel
from atoll.peer.paths import PeerPaths
from atoll.peer.training.data.tokens import Tokenizer
from atoll.peer.training.opening import open_tokenizer, slices_of
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.sampling import Continuation, SamplingOptions


class DenseRun(ValueError):
    """The run is no pipeline."""


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Options of one who asks for text."""

    invite: Invite
    state_dir: Path
    """Keeps the key, and the run's tokenizer if it travels with the run."""
    tokenizer: str | None = None
    """Path of the tokenizer on this machine; one that the spec names is not read."""
    allow_models: frozenset[str] = frozenset()
    """Custom models that the spec may name, as `module:function`."""
    any_model_source: bool = False
    """Accept a custom model of another source than the run's."""
    wait_s: float = TEXT_WAIT_S
    """Seconds to wait for a server of a stage."""
    listen: tuple[str, ...] = LISTEN


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The parameters that a part of a text comes from."""

    token: int
    """the first one, counted from 0 behind the prompt"""
    positions: tuple[int | None, ...]
    """of the stages' logs, from the first stage on"""


@dataclass(kw_only=True)
class LiveRun:
    """A pipeline that is asked for text."""

    spec: RunSpec
    tokenizer: Tokenizer
    model: LiveModel
    readings: list[Reading] = field(default_factory=list)
    """of the last text"""

    async def generate(self, prompt: str, options: SamplingOptions) -> AsyncIterator[str]:
        """Continue a text, as `atoll.peer.training.sampling.generate` does.

        Raises:
            NoServer, RunTooFast: as `LiveModel.logits`.
        """
        text = Continuation(self.tokenizer, prompt, options)
        self.model.expect_rows(len(text.tokens) + options.max_tokens)
        self.readings = []
        while not text.is_over:
            logits_V = await self.model.logits(text.tokens)
            positions = self.model.positions
            if not self.readings or self.readings[-1].positions != positions:
                self.readings.append(Reading(token=text.num_drawn, positions=positions))
            if piece := text.take(logits_V):
                yield piece


@asynccontextmanager
async def live_run(
    options: LiveOptions, on_event: Report = lambda level, notice: None
) -> AsyncIterator[LiveRun]:
    """Join a run as a follower while the block runs.

    Raises:
        CoordinatorError: the coordinator is away, or refuses this follower.
        DenseRun: the run is no pipeline.
        SetupError: its model or its tokenizer is not allowed, or not usable here.
    """
    async with AsyncExitStack() as stack:
        paths = PeerPaths(root=options.state_dir)
        key = _key_file(stack, paths, options.invite.run_id)
        identity = Identity.load_or_create(key)
        invite = options.invite
        run, address = invite.run_id.hex()[:12], invite.addresses[0]
        on_event("info", notices.text_joining(run=run, address=address))
        client = CoordinatorClient(invite, identity, role="follower", version=version("atoll"))
        stack.push_async_callback(client.close)
        joined = await client.join()
        _expect_pipeline(joined.spec)
        allowed, spec = await _with_tokenizer(options, joined.spec, client, paths)
        tokenizer = open_tokenizer(spec, allowed)
        known = slices_of(spec, tokenizer.vocab_size, allowed)
        shape, num_logits = known.shape, known.num_logits
        node = await _node(options, key, joined, client)
        stack.push_async_callback(node.close)
        model = LiveModel(
            node.transport,
            node.roster.peers,
            spec.modules,
            width=shape.width,
            vocab_size=shape.vocab_size,
            num_logits=num_logits,
            context=spec.data.seq_len,
            wait_s=options.wait_s,
            on_event=on_event,
        )
        yield LiveRun(spec=spec, tokenizer=tokenizer, model=model)


def _key_file(stack: AsyncExitStack, paths: PeerPaths, run_id: bytes) -> Path:
    """Return the file of the key; that of a new one while another process uses it."""
    try:
        stack.enter_context(closing(StateDirectory(paths, run_id)))
    except StateDirectoryInUse:
        return Path(stack.enter_context(TemporaryDirectory())) / paths.identity.name
    return paths.identity


def _expect_pipeline(spec: RunSpec) -> None:
    if spec.topology.num_stages == 1:
        raise DenseRun(
            f"run {spec.run.name} is no pipeline, so nothing is gained by asking its peers: the "
            "coordinator writes checkpoints of the whole model, and each can be sampled: "
            "atoll sample CHECKPOINT"
        )


async def _with_tokenizer(
    options: LiveOptions, spec: RunSpec, client: CoordinatorClient, paths: PeerPaths
) -> tuple[Allowed, RunSpec]:
    """Return what the spec may name, and the spec with this machine's files; fetch the tokenizer.

    Raises:
        DataError: it did not arrive, or cannot be parsed.
    """
    sent = None
    if options.tokenizer is None and spec.data.tokenizer_bytes is not None:
        extra("tokenizers", "the run's tokenizer")
        sent = paths.tokenizer
        await keep_tokenizer(spec, client.fetch_tokenizer, sent)
    allowed = Allowed(
        models=options.allow_models,
        files=frozenset({options.tokenizer} if options.tokenizer is not None else ()),
        sent_tokenizer=sent,
        any_source=options.any_model_source,
    )
    own = with_own_files(spec, data=None, tokenizer=options.tokenizer, sent_tokenizer=sent)
    return allowed, own


async def _node(options: LiveOptions, key: Path, joined: Joined, client: CoordinatorClient) -> Node:
    invite = options.invite
    return await Node.start(
        key,
        run_id=invite.run_id.hex(),
        listen_maddrs=usable(options.listen),
        bootstrap=joined.bootstrap or invite.bootstrap,
        admission=joined.admission,
        check=client.admissions,
        clock_offset_s=client.clock_offset_s,
    )
