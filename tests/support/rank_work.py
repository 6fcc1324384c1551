"""What tests let the ranks of a peer do; a function here is named to another process."""

import copy
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import methods
from atoll.optim.inprocess.group import InProcessMember
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.methods.worker import Worker
from atoll.optim.ranks import RankReducer, Ranks, RanksError
from atoll.optim.ranks.placing import RankPlaces
from atoll.optim.ranks.residuals import RemoteResidual
from atoll.optim.reduction.contribution import Feedback
from atoll.optim.state.dtensors import PlacementError, local_runs, put_whole_, whole
from atoll.optim.state.layout import Layout
from atoll.peer.errors import DeviceError, SavedStateError
from atoll.peer.training import models
from atoll.peer.training.data import load as data
from atoll.peer.training.digests import with_digests
from atoll.peer.training.fit import Fit
from atoll.peer.training.learner import StartSmaller
from atoll.peer.training.permission import Allowed
from atoll.peer.training.ranks import OneRank, SeveralRanks
from atoll.peer.training.shards import Saver
from atoll.peer.training.trainer import Trainer, TrainerOptions
from support.reducer_bench import ME, NUMEL, Bench, decided


def model_of(width: int) -> nn.Sequential:
    """Four layers, each a block of its own for methods with fragments."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(width, 1)))


def backward(model: nn.Module, width: int, seed: int, parts: int = 1) -> torch.Tensor:
    """Add the gradients of one batch, divided by the number of batches; return the loss."""
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / parts
    loss.backward()
    return loss.detach()


def sharded(width: int, mesh: object) -> nn.Module:
    """The toy model, cut over ranks block by block, as FSDP2 is meant to be used."""
    model = model_of(width)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cut_by_rows_and_columns(width: int, mesh: object) -> nn.Module:
    """The toy model with each matrix cut in both dimensions, as tensor parallelism with FSDP."""
    model = model_of(width)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            places = [Shard(0), Shard(1) if param.dim() == 2 else Shard(0)]
            placed = distribute_tensor(param.detach(), mesh, places)
            module.register_parameter(name, nn.Parameter(placed))
    return model


def layout_of_cut_parameters() -> None:
    """Compare all that a layout does with a model whose parameters are cut over four ranks."""
    width, rank = 7, distributed.get_rank()  # 7: shards of unequal length
    flat, hybrid = (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
        for shape, names in [((4,), ("shard",)), ((2, 2), ("replicate", "shard"))]
    )
    plain = model_of(width)
    layout = Layout.of(plain)
    first_N = layout.flatten(plain)
    backward(plain, width, seed=0)
    grad_N = layout.gradient(plain)
    spans = ((3, 20), (40 + rank, 150 - 10 * rank))  # cuts parameters, at other places on each rank
    expected = torch.cat([first_N[start:stop] for start, stop in spans])
    new_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    for model in (
        sharded(width, flat),
        sharded(width, hybrid),
        cut_by_rows_and_columns(width, hybrid),
    ):
        assert isinstance(next(model.parameters()), DTensor)
        assert Layout.of(model) == layout
        assert torch.equal(layout.flatten(model), first_N)
        assert torch.equal(layout.flatten(model, spans), expected)
        assert layout.flatten(model, ()).numel() == 0
        assert layout.held(model, expected, spans) is expected
        layout.load_(model, new_N)
        assert torch.equal(layout.flatten(model), new_N)
        local = next(model.parameters()).to_local()
        assert local.numel() < width * width, "each rank holds a shard still"
        for param in model.parameters():
            expect_runs_of(param)

    model = sharded(width, flat)
    backward(model, width, seed=0)  # the same batch on all ranks: the mean of equal gradients
    assert torch.allclose(layout.gradient(model), grad_N, atol=1e-6)
    some = layout.gradient(model, spans)
    assert torch.equal(some, torch.cat([layout.gradient(model)[a:b] for a, b in spans]))


def expect_runs_of(param: DTensor) -> None:
    """Check that the runs of all ranks are the tensor, each at one rank that holds it."""
    numbers = torch.arange(float(param.numel())).view(param.shape)
    placed = distribute_tensor(numbers, param.device_mesh, param.placements)
    runs = local_runs(placed)
    own = [place for start, stop in runs for place in range(start, stop)]
    assert own == placed.to_local().flatten().tolist()[: len(own)]
    assert len(own) in (0, placed.to_local().numel())
    held = torch.zeros(param.numel())
    held[own] = 1
    distributed.all_reduce(held)
    assert held.eq(1).all()


def gathered_root() -> None:
    """Read and write a model whose root FSDP2 keeps gathered after a forward pass alone."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    layout = Layout.of(model)
    with torch.no_grad():
        model(torch.zeros(1, 7))
    layout.load_(model, torch.arange(float(layout.numel)))
    assert torch.equal(layout.flatten(model), torch.arange(float(layout.numel)))


def partial_sum() -> None:
    """Refuse a parameter of which each rank holds an addend."""
    model = nn.Linear(3, 3)
    mesh = init_device_mesh("cpu", (2,))
    addend = DTensor.from_local(torch.ones(3, 3), mesh, [Partial()])
    model.register_parameter("weight", nn.Parameter(addend))
    layout = Layout.of(model)
    with pytest.raises(PlacementError, match="Shard or Replicate"):
        layout.flatten(model)
    with pytest.raises(PlacementError, match="Shard or Replicate"):
        layout.load_(model, torch.zeros(layout.numel))


def two_ranks() -> None:
    gathered_root()
    partial_sum()


WIDTH = 260  # 203,841 values: four cells, the last one short, so no two ranks have ranges alike
INNER_STEPS = 2

METHODS = (
    "diloco(lr=0.7, momentum=0.9)",
    "diloco(codec=sign, feedback=0.5)",
    "diloco(codec=int4, count=2)",
    "muloco(codec=2bit, tau=1)",
    "streaming(count=2, tau=1)",
    "sparseloco",
    "sparseloco(merge=select, tau=1)",
    "co2(codec=int8)",
    "eager(codec=int8, peers=2)",
    "ddp(codec=bf16)",
    "ddp(codec=powersgd(rank=2))",
    "demo(codec=dct(k=8))",
    "dlion",
)
"""Every method with a common state; codecs of every kind of frame."""

MOST_METHODS = (
    "diloco(lr=0.7, momentum=0.9)",
    "diloco(codec=int4, count=2)",
    "streaming(count=2, tau=1)",
    "sparseloco(merge=select, tau=1)",
    "eager(codec=int8, peers=2)",
    "ddp(codec=powersgd(rank=2))",
    "demo(codec=dct(k=8))",
    "dlion",
)
"""Those of them that show every way to reduce."""


class Peer:
    """A peer of one process in a group of this process."""

    def __init__(self, method, reducer, model, *, tokens: int = 12) -> None:
        self.model, self.reducer, self.tokens = model, reducer, tokens
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        self.worker = method.worker(model, optimizer, reducer, inner_steps=INNER_STEPS)

    def step(self, gradients) -> None:
        """Take a step on given gradients, or on this rank's shards of them."""
        for param, gradient in zip(self.model.parameters(), gradients, strict=True):
            param.grad = torch.zeros_like(param)
            put_whole_(param.grad, gradient.to(param.dtype))
        self.worker.step(tokens=self.tokens, loss=1.0)


def gradients_of(seed: int) -> list[torch.Tensor]:
    """Gradients as of a step: the same on all ranks."""
    random = torch.Generator().manual_seed(seed)
    shapes = [param.shape for param in model_of(WIDTH).parameters()]
    return [torch.randn(shape, generator=random) * 0.1 for shape in shapes]


def recorded(kind, monkeypatch, offers: list) -> None:
    """Note the frames of each offer of a class of residuals."""
    encode = kind.offer

    def offer(self, delta, weight):
        found = encode(self, delta, weight)
        offers.append((found.frames, found.squares))
        return found

    monkeypatch.setattr(kind, "offer", offer)


def beside_one_process(
    spec: str,
    *,
    cut: bool = True,
    dtype: torch.dtype = torch.float32,
    steps: range = range(2 * INNER_STEPS),
    folder: Path | None = None,
) -> None:
    """Train a peer of these ranks and, at the leader, the same peer in one process.

    Both are in a group with one other peer, and have the same gradients. After each step they have
    the same parameters; at the end the same frames, states and residuals as well. In a folder they
    leave what they have at the end, and resume from what other ranks have left there.
    """
    method, ranks = methods.parse(spec), Ranks(timeout_s=60)
    mesh = init_device_mesh("cpu", (ranks.size,))

    def model_here(is_cut: bool = False) -> nn.Module:
        model = model_of(WIDTH).to(dtype)
        if is_cut:
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    group = InProcessGroup(2, method, inner_steps=INNER_STEPS)
    reducer = RankReducer(ranks, lambda: group.member(0))
    ours = Peer(method, reducer, model_here(cut), tokens=12 // ranks.size)
    peers, frames = [ours], ([], [])  # frames: of ours, and of the same peer in one process
    patch = pytest.MonkeyPatch()
    if ranks.leads:
        alone = InProcessGroup(2, method, inner_steps=INNER_STEPS)
        twin, *others = [
            Peer(method, each.member(index), model_here())
            for each, index in [(alone, 0), (alone, 1), (group, 1)]
        ]
        recorded(RemoteResidual, patch, frames[0])
        peers += others[1:]
    if folder is not None and (folder / "0.pt").exists():
        for index, peer in enumerate(peers):
            peer.worker.load_state_dict(loaded(folder / f"{index}.pt") if ranks.leads else {})
        if ranks.leads:  # one process, from what the ranks have left
            for index, peer in enumerate([twin, others[0]]):
                peer.worker.load_state_dict(loaded(folder / f"{index}.pt"))
    layout = Layout.of(ours.model)
    for step in steps:
        mine, theirs = gradients_of(2 * step), gradients_of(2 * step + 1)
        if ranks.leads:
            for other in others:  # first: whoever ends a window last reduces it, for all at once
                other.step(theirs)
            with pytest.MonkeyPatch.context() as noted:
                twins: list = []
                recorded(Feedback, noted, twins)
                twin.step(mine)
            frames[1].extend(twins[::2])  # its own, then the other peer's
        ours.step(mine)
        found_N = layout.flatten(ours.model)
        if ranks.leads:
            assert torch.equal(found_N, layout.flatten(twin.model)), f"{spec}: step {step}"
    state = ours.worker.state_dict()
    if ranks.leads:
        assert frames[0] == frames[1] != []
        assert group.state.position == alone.state.position > 0
        assert group.state.root() == alone.state.root()
        assert group.statistics() == alone.statistics()
        compare(twin.worker.state_dict(), state)
        if folder is not None:
            torch.save(state, folder / "0.pt")
            torch.save(others[1].worker.state_dict(), folder / "1.pt")
    patch.undo()
    ranks.close()


def compare(expected: object, got: object, at: str = "state") -> None:
    """Check that two saved states have the same bits; times differ."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, got), at
    elif isinstance(expected, dict):
        assert set(expected) == set(got), at
        for key, value in expected.items():
            if key not in ("compute_s", "wait_s", "outer_s", "in_part"):
                compare(value, got[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(got), at
        for index, pair in enumerate(zip(expected, got, strict=True)):
            compare(*pair, f"{at}.{index}")
    else:
        assert expected == got or expected != expected, f"{at}: {expected} and {got}"


def loaded(path: Path) -> dict:
    return torch.load(path, weights_only=False)


def with_methods(specs: Sequence[str]) -> None:
    for spec in specs:
        beside_one_process(spec)


def some_methods() -> None:
    """As above with more ranks than two; parameters that are whole on each, and in bf16."""
    beside_one_process("diloco(codec=int8, count=2, tau=1)", cut=False, dtype=torch.bfloat16)
    if distributed.get_world_size() == 3:
        beside_one_process("sparseloco")
        beside_one_process("eager(codec=int8, peers=2)", dtype=torch.bfloat16)


def train_and_save(spec: str, steps: range, folder: Path) -> None:
    beside_one_process(spec, steps=steps, folder=folder)


# Faults


def rank_of_no_run() -> None:
    """Report on all ranks what the leader failed with."""

    def join() -> InProcessGroup:
        raise OSError("the disk is full")

    ranks = Ranks(timeout_s=30)
    with pytest.raises(OSError if ranks.leads else RanksError, match="the disk is full"):
        RankReducer(ranks, join)


def rank_out_of_step() -> None:
    """Notice that one rank calls `step` less often."""
    ranks = Ranks(timeout_s=30)
    group = InProcessGroup(1, inner_steps=1)
    ours = Peer(group.method, RankReducer(ranks, lambda: group.member(0)), model_of(8))
    ours.worker.resize(1 + ranks.rank)
    with pytest.raises(RanksError, match="equally often"):
        for _ in range(2):
            ours.step([torch.zeros_like(param) for param in ours.model.parameters()])


def rank_that_dies(victim: int, folder: Path) -> None:
    """Die between two windows; the others notice at the next meeting."""
    ranks = Ranks(timeout_s=60)
    group = InProcessGroup(1, inner_steps=1)
    ours = Peer(group.method, RankReducer(ranks, lambda: group.member(0)), model_of(8))
    ours.step([torch.zeros_like(param) for param in ours.model.parameters()])
    if ranks.rank == victim:
        die()
    with pytest.raises(RanksError, match="lost"):
        ours.step([torch.zeros_like(param) for param in ours.model.parameters()])
    (folder / str(ranks.rank)).touch()


def silent_leader() -> None:
    """A rank that hears nothing for its patience ends; a waiting leader is heard."""
    ranks = Ranks(timeout_s=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.optim.ranks.ranks.PULSE_S", 0.2)
        with ranks.leading():
            if ranks.leads:
                threading.Event().wait(4)  # twice the patience
        assert ranks.tell("here" if ranks.leads else None) == "here"
    if not ranks.leads:
        with pytest.raises(RanksError, match="lost rank 0"):
            ranks.tell(None)


def without_a_word() -> None:
    rank_of_no_run()
    rank_out_of_step()
    silent_leader()


# Trainers


def spec_to_train() -> RunSpec:
    return RunSpec.from_dict(
        {
            "run": {"rounds": 3, "seed": 3},
            "model": {"overrides": {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}},
            "data": {"seq_len": 16},
            "inner": {
                "batch_size": 2,
                "grad_accumulation": 2,
                "warmup_steps": 3,
                "lr": 0.01,
                "clip_norm": 0.5,
            },
            "outer": {"method": "diloco", "inner_steps": 3},
        }
    )


def corpus_to_train() -> data.LocalCorpus:
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def trainer_of(reducer, ranks: OneRank) -> Trainer:
    options = TrainerOptions(peer_id="one", device="cpu", ranks=ranks)
    return Trainer(spec_to_train(), reducer, options, corpus=corpus_to_train())


def lets_run_out_of_memory(patch: pytest.MonkeyPatch, holds: int) -> None:
    """Let this rank's device hold so many sequences at once."""
    loss_of = models.loss_of

    def limited(model, inputs_BT, targets_BT):
        loss = loss_of(model, inputs_BT, targets_BT)
        if torch.is_grad_enabled() and len(inputs_BT) > holds:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    patch.setattr(models, "loss_of", limited)


@contextmanager
def trainer_on_ranks(
    folder: Path, *, cut: bool, model: dict[str, object] | None = None, **inner: object
) -> Iterator[tuple[SeveralRanks, Trainer, pytest.MonkeyPatch]]:
    """A trainer of these ranks, with its state in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.peer.training.ranks.fits", lambda *_, **__: not cut)
        ranks = SeveralRanks(Ranks(timeout_s=60))
        spec = spec_to_train().model_dump(mode="json")
        spec |= {"inner": spec["inner"] | inner} | ({"model": model} if model else {})
        spec = RunSpec.from_dict(spec)
        if spec.model.init is not None:
            spec = with_digests(spec, None)
        options = TrainerOptions(
            peer_id="one",
            device="cpu",
            ranks=ranks,
            state_path=folder / "trainer.safetensors",
            allowed=Allowed.everything_in(spec),
        )
        reducer = RankReducer(ranks.ranks, member_alone)
        yield ranks, Trainer(spec, reducer, options, corpus=corpus_to_train()), patch


def memory_of_one_rank(folder: Path) -> None:
    """Repeat the step on all ranks, with smaller pieces, where one of them is out of memory."""
    with trainer_on_ranks(folder, cut=False) as (ranks, trainer, patch):
        if ranks.rank == 1:
            lets_run_out_of_memory(patch, 1)
        for _ in range(3):
            trainer.step()
        assert trainer.learner.fit == Fit(sequences=1)
        assert trainer.statistics().skipped_steps == 0
        params_N = trainer.worker.layout.flatten(trainer.learner.model)
        assert ranks.gathered(params_N.tolist())[1:] == [params_N.tolist()] * ranks.leads


def too_little_memory(folder: Path) -> None:
    """End where a rank cannot hold a single sequence: on all ranks with the same message."""
    with trainer_on_ranks(folder, cut=False) as (ranks, trainer, patch):
        if ranks.rank == 1:
            lets_run_out_of_memory(patch, 0)
        with pytest.raises(DeviceError, match="does not fit on cpu"):
            trainer.step()


def memory_of_a_shard(folder: Path) -> None:
    """Leave the others where a rank is out of memory while they wait for its part of the model."""
    with trainer_on_ranks(folder, cut=True) as (ranks, trainer, patch):
        if ranks.rank == 1:
            lets_run_out_of_memory(patch, 1)
        # The others get torch's own error, from a collective within the model.
        with pytest.raises(StartSmaller if ranks.rank == 1 else RuntimeError, match=r"memory|peer"):
            trainer.run()


def memory_is_remembered(folder: Path) -> None:
    """Start with what the last start has found to fit."""
    with trainer_on_ranks(folder, cut=True) as (_, trainer, patch):
        lets_run_out_of_memory(patch, 1)
        trainer.run()
        assert trainer.finished and trainer.learner.fit == Fit(sequences=1)


def scaled_trainers(folder: Path) -> None:
    """Scale the loss alike on all ranks, also where one of them alone overflows."""
    for cut in (False, True):
        with trainer_on_ranks(folder, cut=cut, precision="float16") as (ranks, trainer, patch):
            loss_of, spoils = models.loss_of, [False]

            def spoiled(*given, loss_of=loss_of, spoils=spoils, ranks=ranks):
                return loss_of(*given) * (1e38 if spoils[0] and ranks.rank == 1 else 1.0)

            patch.setattr(models, "loss_of", spoiled)
            for step in range(4):
                spoils[0] = step == 2
                trainer.step()
            assert 1 <= trainer.statistics().skipped_steps < 4
            scale = trainer.learner.state_dict()["scaler"]["scale"]
            assert scale < 2**16
            assert ranks.gathered(scale)[1:] == [scale] * ranks.leads
            params_N = trainer.worker.layout.flatten(trainer.learner.model)
            assert params_N.isfinite().all()
            assert ranks.gathered(params_N.tolist())[1:] == [params_N.tolist()] * ranks.leads


WIDE = {"overrides": {"dim": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 96}}
"""A model of which some shards are large enough to have moments of 8 bits."""


def moments_of_8_bits(folder: Path) -> None:
    """Resume to the bit from moments of 8 bits, whole on each rank or cut; leave the last ones."""
    for cut in (False, True):
        with trainer_on_ranks(folder, cut=cut, model=WIDE, state="8bit") as (ranks, trainer, _):
            layout, model = trainer.worker.layout, trainer.learner.model
            for _ in range(4):
                trainer.step()
            trainer.save(folder / "trainer.safetensors")
            ranks.all_of(True)
            saved = trainer.worker.state_dict()
            trainer.step()
            next_N = layout.flatten(model)
            trainer.load(folder / "trainer.safetensors")
            again = trainer.worker.state_dict()
            trainer.step()
            assert torch.equal(layout.flatten(model), next_N)
            if ranks.leads:
                compare(saved["inner"], again["inner"])
                assert set(kinds_of_moments(again["inner"])) == {dict, torch.Tensor}
                torch.save(saved["inner"], folder / "inner.pt")


def resume_moments_of_8_bits(folder: Path) -> None:
    """Have the same moments on another number of ranks, where other tensors can have 8 bits."""
    with trainer_on_ranks(folder, cut=True, model=WIDE, state="8bit") as (ranks, trainer, _):
        trainer.load(folder / "trainer.safetensors")
        state = trainer.worker.state_dict()["inner"]
        trainer.step()
        if ranks.leads:
            before = loaded(folder / "inner.pt")
            compare(in_float(before), in_float(state))
            kinds, others = kinds_of_moments(before), kinds_of_moments(state)
            assert dict in others and others != kinds


def adapters_on_ranks(folder: Path) -> None:
    """Resume to the bit where only adapters are trained, on a model that is whole or cut."""
    lora = {"rank": 2, "targets": ["qkv", "out", "gate_up"]}
    model = {"init": str(folder / "base"), "lora": lora}
    for cut in (False, True):
        with trainer_on_ranks(folder, cut=cut, model=model) as (ranks, trainer, _):
            frozen = {
                name: whole(param).clone()
                for name, param in trainer.learner.model.named_parameters()
                if not param.requires_grad
            }
            for _ in range(4):
                trainer.step()
            trainer.save(folder / "trainer.safetensors")
            ranks.all_of(True)
            expected = trainer.evaluate(batches=3)
            trainer.step()
            next_N = trainer.worker.layout.flatten(trainer.learner.model)
            trainer.load(folder / "trainer.safetensors")
            assert trainer.evaluate(batches=3) == expected
            trainer.step()
            assert torch.equal(trainer.worker.layout.flatten(trainer.learner.model), next_N)
            for name, param in trainer.learner.model.named_parameters():
                if name in frozen:
                    assert torch.equal(whole(param), frozen[name])


def rank_lost_while_loading(folder: Path) -> None:
    """End where a rank dies while all load their state, instead of going on without it."""
    with trainer_on_ranks(folder, cut=False) as (ranks, trainer, patch):
        trainer.step()
        trainer.save(folder / "trainer.safetensors")
        if ranks.rank == 1:
            patch.setattr(trainer.worker.places, "load_optimizer", die)
        with pytest.raises(RanksError, match="lost"):
            trainer.load(folder / "trainer.safetensors")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kinds_of_moments(inner: dict) -> list[type]:
    return [type(each["exp_avg"]) for each in inner["state"].values()]


def in_float(inner: dict) -> dict:
    """The moments of an optimizer's state as they are computed with."""

    def value_of(moment: object) -> object:
        if not isinstance(moment, dict):
            return moment
        values = moment["qmap"][moment["codes"].int()].view(len(moment["scale"]), -1)
        return (values * moment["scale"].view(-1, 1)).view(moment["codes"].shape)

    return {
        number: {name: value_of(value) for name, value in each.items()}
        for number, each in inner["state"].items()
    }


def trainers_on_two_hosts(folder: Path) -> None:
    """Cut the model over the two ranks of each host, and copy it from host to host."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    plain_N = None
    for cut in (False, True):
        with trainer_on_ranks(folder, cut=cut) as (ranks, trainer, _):
            for _ in range(4):  # a round, and a step of the next window
                trainer.step()
            params_N = trainer.worker.layout.flatten(trainer.learner.model)
            if plain_N is None:
                plain_N = params_N
                continue
            assert torch.allclose(params_N, plain_N, atol=1e-5)
            param = next(trainer.learner.model.parameters())
            assert isinstance(param, DTensor) and param.device_mesh.shape == (2, 2)
            assert param.placements == (Replicate(), Shard(0))
            places = trainer.worker.places
            assert isinstance(places, RankPlaces)
            # What synchronises is cut over all four, whichever host they are on; one rank talks.
            assert len(places.ranges[0]) == 4
            assert trainer._ranks.leads is (distributed.get_rank() == 0)
            trainer.save(folder / "trainer.safetensors")
            ranks.all_of(True)
            sizes = [file.stat().st_size for file in sorted(folder.glob("trainer.*.safetensors"))]
            assert len(sizes) == 3
            if ranks.leads:  # one host's ranks alone save the moments, which both have
                alone = trainer_of(member_alone(), OneRank())
                alone.load(folder / "trainer.safetensors")
                found_N = alone.worker.layout.flatten(alone.learner.model)
                assert torch.equal(found_N, params_N)
            moments = trainer.learner.optimizer.state[param]["exp_avg"]
            assert bool(local_runs(moments)) is (distributed.get_rank() < 2)


def member_alone() -> InProcessMember:
    return InProcessGroup(1, spec_to_train().method(), inner_steps=3, rounds=3).member(0)


def trainers_on_ranks(folder: Path) -> None:
    """Train with the model whole on each rank, then cut: the same to the rounding of sums.

    The state that the second saves resumes in one process, with the same held-out loss.
    """
    ends, losses = [], []
    for fits in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atoll.peer.training.ranks.fits", lambda *_, fits=fits, **__: fits)
            ranks = SeveralRanks(Ranks(timeout_s=60))
            reducer = RankReducer(ranks.ranks, member_alone)
            trainer = trainer_of(reducer, ranks)
            assert isinstance(next(trainer.learner.model.parameters()), DTensor) is not fits
            for _ in range(5):
                trainer.step()
            before_N = trainer.worker.layout.flatten(trainer.learner.model)
            losses.append(trainer.evaluate(batches=5))  # not a multiple of the ranks
            trainer.learner.use(Fit(sequences=1))
            sizes: list[int] = []
            hook = trainer.learner.model.register_forward_hook(
                lambda module, given, out, sizes=sizes: sizes.append(len(given[0]))
            )
            assert trainer.evaluate(batches=5) == pytest.approx(losses[-1], rel=1e-6)
            assert sizes == [1] * 2 * 3, "the device holds no whole batch; all make as many passes"
            hook.remove()
            after_N = trainer.worker.layout.flatten(trainer.learner.model)
            assert torch.equal(before_N, after_N), "what was trained comes back after validation"
            ends.append(after_N)
            assert trainer.statistics().tokens == 5 * 2 * 2 * 16 * ranks.size
            assert trainer.statistics().device == f"{ranks.size} x cpu"
            trainer.save(folder / "trainer.safetensors")
            trainer.step()  # and the round
            assert reducer.position == 2
    assert torch.allclose(*ends, atol=1e-5)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    if ranks.leads:
        alone = trainer_of(member_alone(), OneRank())
        alone.load(folder / "trainer.safetensors")
        assert torch.equal(alone.worker.layout.flatten(alone.learner.model), ends[1])
        assert alone.evaluate(batches=5) == pytest.approx(losses[1], abs=1e-5)
    with pytest.raises(SavedStateError, match="does not exist"):
        trainer.load(folder / "none")


# Saves in shards

SPEC = RunSpec.from_dict({"outer": {"method": "diloco"}})


class Vector(nn.Module):
    """Two cells and a bit, and a buffer that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))
        self.register_buffer("seen", torch.zeros(3))


def vector_worker(reducer, *, cut: bool = True) -> Worker:
    model = Vector()
    if cut and distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=False)
    return reducer.method.worker(model, inner, reducer, inner_steps=2)


def vector_step(worker, *, tokens: int = 100) -> None:
    worker.model.w.grad = torch.zeros_like(worker.model.w)
    put_whole_(worker.model.w.grad, torch.linspace(-1, 1, NUMEL))
    worker.step(tokens=tokens, loss=1.0)


@contextmanager
def ranks_of_a_run(folder: Path, position: int) -> Iterator[tuple[SeveralRanks, Worker, Bench]]:
    """A worker of these ranks in a run whose log is at a position."""
    ranks = SeveralRanks(Ranks(timeout_s=60))
    bench = Bench(folder / f"log-{position}-{ranks.rank}", position=position, patience_s=0.1)
    with closing(bench):
        yield ranks, vector_worker(RankReducer(ranks.ranks, lambda: bench.reducer)), bench


def save_in_shards(folder: Path) -> None:
    """Save at a window's end and within one; the last save does not reach its end."""
    with ranks_of_a_run(folder, 0) as (ranks, worker, bench), ThreadPoolExecutor(1) as writer:
        bench.deliver(decided(0, ME, settles=1, included=[True] * 2))
        saver = Saver(folder / "trainer.safetensors", ranks, run="run")
        for number in range(4):
            vector_step(worker)
            saving = saver.begin(worker.share_dict(), writer)
            if number < 3:
                whole = copy.deepcopy(worker.state_dict())
                saver.end(saving)
            saving.written.result()
        ranks.all_of(True)
        if ranks.leads:
            assert worker.statistics().position == 1
            torch.save(whole, folder / "whole.pt")
            names = {file.name.count(".") for file in folder.glob("trainer.*")}
            assert names == {1, 2, 3}, (
                "a shard of each save, the first's file, and what is to be it"
            )


def load_shards(folder: Path) -> None:
    """Resume with these ranks from what others have saved, and save again."""
    with ranks_of_a_run(folder, 1) as (ranks, worker, _), ThreadPoolExecutor(1) as writer:
        saver = Saver(folder / "trainer.safetensors", ranks, run="run")
        worker.load_shared(worker.places.shared(*saver.load()))
        state = worker.state_dict()
        if ranks.leads:
            compare(loaded(folder / "whole.pt"), state)
        saver.end(saver.begin(worker.share_dict(), writer))
        saver.load()
        ranks.all_of(True)
        files = sorted(folder.glob("trainer.*"))
        if ranks.leads:
            assert len(files) == ranks.size
            sizes = [file.stat().st_size / NUMEL for file in files]
            assert sum(sizes) == pytest.approx(16, abs=0.2 * ranks.size)
            # Drift and residual lie at one rank, since ranges are of whole cells.
            assert max(sizes) == pytest.approx(8 + 8 / ranks.size, abs=0.3)
            Path(files[0]).rename(folder / "elsewhere")
        ranks.all_of(True)
        with pytest.raises(SavedStateError, match="is on no machine of this peer"):
            saver.load()
        ranks.all_of(True)
        if ranks.leads:
            (folder / "elsewhere").write_bytes((folder / "elsewhere").read_bytes()[:-1])
            (folder / "elsewhere").rename(files[0])
        ranks.all_of(True)
        with pytest.raises(SavedStateError, match="is damaged"):
            saver.load()
