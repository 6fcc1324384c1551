"""Servers and a client of texts over a network in memory, and texts of gathered checkpoints."""

import random
from contextlib import closing
from sqlite3 import connect

import torch

from atoll.dht.roster import PeerRecord, StagePlace
from atoll.dht.scoped import transport_of
from atoll.dht.testing.virtualtime import inline
from atoll.optim.log.entry import Entry
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LOG_FILE, LogStore
from atoll.peer.inference.client import LiveModel
from atoll.peer.inference.served import ServedStage
from atoll.peer.inference.server import TextServer
from atoll.peer.training.data.load import ByteTokenizer
from atoll.peer.training.devices import Device
from atoll.peer.training.opening import first_state, slices_by_stage, slices_of
from atoll.peer.training.permission import Allowed
from atoll.peer.training.sampling import Continuation, SamplingOptions, generate
from atoll.peer.training.stages import StageModel
from support.organiser import until
from support.stages import staged_spec, trained_states

CONTEXT = 16
VOCAB = ByteTokenizer().vocab_size


class Stages:
    """A pipeline's model at any position of its logs, whole and in stages."""

    def __init__(self, spec=None, allowed=None):
        self.spec = spec or staged_spec()
        self.known = slices_of(self.spec, VOCAB, allowed or Allowed())
        self._states = {}

    def state(self, module, position):
        if position not in self._states:
            self._states[position] = trained_states(self.spec, position)
        return self._states[position][module]

    def served(self, module):
        slices = slices_by_stage(self.spec, self.known)[module]
        return ServedStage(self.known.build(slices, seed=3), self.known.num_logits)

    def whole(self, positions):
        """The model of a gathered checkpoint: each stage at its position."""
        slices = {}
        for module, position in zip(self.spec.modules, positions, strict=True):
            stage = self.known.build(slices_by_stage(self.spec, self.known)[module], seed=3)
            state = self.state(module, position)
            state.layout.load_(stage, state.params_N)
            slices |= zip(stage.indices, stage.slices.values(), strict=True)
        return StageModel(slices, self.known.shape, num_slices=len(self.known))

    def text(self, positions, prompt, **options):
        """Return what `atoll sample` prints of such a checkpoint."""
        return "".join(
            generate(
                self.whole(positions),
                ByteTokenizer(),
                prompt,
                SamplingOptions(**options),
                context=CONTEXT,
                device=Device.choose("cpu"),
            )
        )


class Server:
    """A peer that serves a stage, and its log, which stands at a position."""

    def __init__(self, network, tasks, stages, name, module, *, position=4, share=1.0, **rules):
        self.name, self.module, self.stages, self.position = name, module, stages, position
        self.tokens_per_s, self.incarnation = 100.0, "1" * 32
        self.here = True
        stage = stages.served(module)
        self.server = TextServer(
            stage,
            self.stands_at,
            transport_of(module, network.transport(name)),
            share=share,
            tasks=tasks,
            compute=inline,
            **rules,
        )

    def stands_at(self):
        return self.position, self.stages.state(self.module, self.position).params_N

    @property
    def record(self):
        return record(
            self.name,
            self.module,
            tokens_per_s=self.tokens_per_s,
            incarnation=self.incarnation,
        )


def record(name, module, *, tokens_per_s=100.0, incarnation="1" * 32, duty="serving"):
    return PeerRecord(
        peer_id=name,
        addresses=(),
        incarnation=incarnation,
        role="trainer",
        epoch=0,
        position=0,
        tokens_per_s=0.0,
        uplink_mbit_s=0.0,
        downlink_mbit_s=0.0,
        ready_in_s=0.0,
        protocol=1,
        module=module,
        place=StagePlace(duty=duty, tokens_per_s=tokens_per_s),
    )


def client(network, servers, stages, *, wait_s=30.0, name="client", said=None, **shape):
    """A client that sees the servers that are here."""

    async def look():
        return {each.name: each.record for each in servers if each.here}

    return LiveModel(
        network.transport(name),
        look,
        stages.spec.modules,
        **{
            "width": stages.known.shape.width,
            "vocab_size": VOCAB,
            "num_logits": stages.known.num_logits,
            "context": CONTEXT,
        }
        | shape,
        wait_s=wait_s,
        on_event=lambda level, text: (said if said is not None else []).append(text),
        rng=random.Random(7),
    )


async def continued(model, prompt, *, between=lambda number: None, **options):
    """Generate; return the text, and the positions that each token was read at."""
    text = Continuation(ByteTokenizer(), prompt, SamplingOptions(**options))
    model.expect_rows(len(text.tokens) + options["max_tokens"])
    pieces, read = [], []
    while not text.is_over:
        between(text.num_drawn)
        pieces.append(text.take(await model.logits(text.tokens)))
        read.append(model.positions)
    return "".join(pieces), read


def replayed(spec, folder, module, position):
    """The state of a module after a round, by the log in its coordinator's folder."""
    state = first_state(spec, Allowed(), module=module)
    replay = Replay(spec.method(), state.layout)
    with closing(connect(folder / module / LOG_FILE)) as db:
        (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    with closing(LogStore(folder / module, run_id=run_id, genesis_chain=bytes(32))) as store:
        until(lambda: store.head.position >= position, f"round {position} of {module}")
        for record in store.headers(0, position):
            entry = Entry.decode(record.entry)
            state = replay.next_state(state, entry, store.body(entry.position))
    return state


def gathered(spec, folder, positions):
    """The model that the stages' states at these positions make up."""
    known, slices = slices_of(spec, VOCAB, Allowed()), {}
    for module, position in zip(spec.modules, positions, strict=True):
        stage = known.build(slices_by_stage(spec, known)[module], seed=spec.run.seed)
        state = replayed(spec, folder, module, position)
        state.layout.load_(stage, state.params_N)
        slices |= zip(stage.indices, stage.slices.values(), strict=True)
    return StageModel(slices, known.shape, num_slices=len(known))


def drawn_again(spec, folder, prompt, options, readings):
    """The text of the gathered states, each for the tokens that were read from it."""
    text, pieces = Continuation(ByteTokenizer(), prompt, options), []
    models = [(each.token, gathered(spec, folder, each.positions)) for each in readings]
    while not text.is_over:
        model = next(model for token, model in reversed(models) if token <= text.num_drawn)
        with torch.no_grad():
            logits_1TV = model(torch.tensor([text.tokens[-spec.data.seq_len :]]))
        pieces.append(text.take(logits_1TV[0, -1]))
    return "".join(pieces)
