"""Train your own model on several GPUs or processes in your own loop: FSDP2 and torchrun.

    torchrun --nproc-per-node 2 scripts/example_fsdp2.py                      no network
    torchrun --nproc-per-node 8 scripts/example_fsdp2.py --invite atoll1...   one peer of a run

All ranks together are one peer. The first one joins the run; each keeps its shard of the model and
its range of what the run synchronises. Works without GPUs too. The loop is the one of FSDP2's
tutorial, with gradient accumulation, a gradient scaler and torch.compile if you want them; the
four lines that are Atoll's are numbered. To train this model in a run, name it in RUN.toml, and
start the coordinator from the folder `scripts`:

    [model]
    custom = "example_fsdp2:build"

With --state FILE the peer resumes where it stopped, with any number of ranks.
"""

import argparse
import os
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from atoll.optim import InProcessGroup
from atoll.optim.ranks import RankReducer, Ranks
from atoll.peer.training.models import model

BATCH_SIZE, SEQ_LEN = 8, 64


class Block(nn.Module):
    """Looks back eight tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, kernel_size=8)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        past_BDT = nn.functional.pad(self.norm(x_BTD).transpose(1, 2), (7, 0))
        return x_BTD + self.out(nn.functional.gelu(self.mix(past_BDT).transpose(1, 2)))


class ByteModel(nn.Module):
    """Predicts the next byte; nothing in it depends on Atoll."""

    def __init__(self, vocab_size: int = 256, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return nn.functional.cross_entropy(self.head(x_BTD).flatten(0, 1), targets_BT.flatten())


@model
def build(*, vocab_size: int, seq_len: int, **_: object) -> nn.Module:
    """Build the model, as named by `custom` in RUN.toml."""
    return ByteModel(vocab_size)


class Text:
    """Random windows of this file's folder; every rank draws others."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(__file__).parent.glob("*.py"))
        data = bytearray(b"".join(file.read_bytes() for file in files))
        self.bytes_N = torch.frombuffer(data, dtype=torch.uint8)
        self.random = torch.Generator().manual_seed(seed)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        last = len(self.bytes_N) - SEQ_LEN - 1
        starts_B1 = torch.randint(last, (BATCH_SIZE, 1), generator=self.random)
        window_BT = self.bytes_N[starts_B1 + torch.arange(SEQ_LEN + 1)].long().to(device)
        return window_BT[:, :-1], window_BT[:, 1:]


def train(reducer: RankReducer, ranks: Ranks, args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)  # all ranks build one model
    model = ByteModel().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=args.scaler)
    text = Text(seed=1000 * args.seed + ranks.rank)

    inner_steps = reducer.spec.outer.inner_steps
    worker = reducer.method.worker(model, optimizer, reducer, inner_steps=inner_steps)  # 3: join
    if args.state and args.state.exists():
        worker.load_state_dict(torch.load(args.state) if ranks.leads else {})
    position = reducer.position
    while not reducer.finished:
        worker.zero_grad()
        loss = torch.zeros((), device=device)
        for micro in range(args.accumulate):
            model.set_requires_gradient_sync(micro == args.accumulate - 1)
            tokens_BT, targets_BT = text.batch(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.scaler):
                part = forward(tokens_BT, targets_BT)
            scaler.scale(part / args.accumulate).backward()
            loss += part.detach() / args.accumulate
        if args.scaler:
            scaler.unscale_(worker)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tokens = args.accumulate * tokens_BT.numel()  # of this rank; they are added up
        scaler.step(worker, tokens=tokens, loss=loss)  # 4: instead of scaler.step(optimizer)
        scaler.update()
        if ranks.leads and reducer.position > position:
            position = reducer.position
            print(f"round {position:3}  loss {worker.statistics().loss:.3f}", flush=True)
    if args.state:
        state = worker.state_dict()  # all ranks take part; the first one gets it
        if ranks.leads:
            torch.save(state, args.state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--invite", help="Invite of a run (default: no network).")
    parser.add_argument("--state-dir", type=Path, help="State directory of the peer in a run.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds without a network.")
    parser.add_argument("--accumulate", type=int, default=2, help="Batches of a step.")
    parser.add_argument("--scaler", action="store_true", help="Mixed precision with a scaler.")
    parser.add_argument("--compile", action="store_true", help="torch.compile.")
    parser.add_argument("--state", type=Path, help="File to resume from and to save to.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of this peer's text.")
    args = parser.parse_args()

    def join():
        if args.invite is None:
            return InProcessGroup(
                1, inner_steps=5, rounds=args.rounds, lr=0.8, momentum=0.3
            ).member(0)
        from atoll.peer.daemon.network import connect

        return connect(args.invite, state_dir=args.state_dir)

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    ranks = Ranks()  # 1: all processes that torchrun has started
    with closing(RankReducer(ranks, join)) as reducer:  # 2: the first one joins
        train(reducer, ranks, args)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
