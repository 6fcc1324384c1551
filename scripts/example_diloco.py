"""Train your own model in your own loop, with DiLoCo in three lines.

    python scripts/example_diloco.py                      four workers in this process, no network
    python scripts/example_diloco.py --invite atoll1...   one peer of a run

Any torch module and any torch optimizer will do. To train this model in a run, name it in RUN.toml
and start the coordinator from the folder `scripts`, where it can import the module:

    [model]
    custom = "example_diloco:build"

The peers of that run may be this script, each with its own --state-dir, or, from the same folder,
`atoll peer INVITE --allow-model example_diloco:build`.
"""

import argparse
import logging
import math
import sysconfig
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.optim import DiLoCo, InProcessGroup, Reducer, outer_defaults
from atoll.peer.training.models import model

SEQ_LEN = 64
BATCH_SIZE = 16
INNER_STEPS = 10


class ByteModel(nn.Module):
    """Predicts a byte from the eight before it; nothing in it depends on Atoll."""

    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 64)
        self.mix = nn.Conv1d(64, 192, kernel_size=8)
        self.head = nn.Linear(192, vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BDT = nn.functional.pad(self.embedding(tokens_BT).transpose(1, 2), (7, 0))
        return self.head(nn.functional.gelu(self.mix(x_BDT)).transpose(1, 2))


@model
def build(*, vocab_size: int, seq_len: int, **_: object) -> nn.Module:
    """Build the model, as named by `custom` in RUN.toml."""
    return ByteModel(vocab_size)


class Text:
    """Random windows of some source files."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = bytearray(b"".join(file.read_bytes() for file in files))
        self.bytes_N = torch.frombuffer(data, dtype=torch.uint8)
        self.random = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        last = len(self.bytes_N) - SEQ_LEN - 1
        starts_B1 = torch.randint(last, (BATCH_SIZE, 1), generator=self.random)
        window_BT = self.bytes_N[starts_B1 + torch.arange(SEQ_LEN + 1)].long()
        return window_BT[:, :-1], window_BT[:, 1:]


def train(reducer: Reducer, seed: int, steps: int, inner_steps: int = INNER_STEPS, join=DiLoCo):
    """Run the whole loop, as a generator only so that workers can alternate in one process.

    With a method other than DiLoCo, pass that method's worker as `join`.
    """
    model = ByteModel()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text(seed)
    diloco = join(model, inner, reducer, inner_steps=inner_steps)  # 1: join
    for _ in range(steps):
        tokens_BT, targets_BT = text.batch()
        logits_BTV = model(tokens_BT)
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        inner.zero_grad()
        loss.backward()
        diloco.step(tokens=tokens_BT.numel(), loss=loss)  # 2: instead of inner.step()
        yield diloco.statistics()  # 3: watch the progress


def in_process(workers: int, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for more
    lr, momentum = outer_defaults(steps // INNER_STEPS, INNER_STEPS, workers)
    group = InProcessGroup(workers, lr=lr, momentum=momentum, codec="int8")
    loops = [train(group.member(index), seed=index, steps=steps) for index in range(workers)]
    sent = 0
    for step, statistics in enumerate(zip(*loops, strict=True), start=1):
        if step % INNER_STEPS == 0:
            loss = sum(s.loss for s in statistics) / workers
            sent, before = group.statistics().body_bytes, sent
            print(f"round {group.state.position:3}  loss {loss:.3f}  update {sent - before} bytes")
    print(f"state root {group.state.root().hex()[:16]} on all {workers} workers")


def networked(invite: str, state_dir: Path, steps: int) -> None:
    from atoll.peer.daemon.network import connect

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with closing(connect(invite, state_dir=state_dir, name=state_dir.name)) as reducer:
        run, inner_steps, position = reducer.spec.run, reducer.spec.outer.inner_steps, 0
        seed = int.from_bytes(reducer.peer_id.encode()[-4:])  # gives every peer its own text
        for statistics in train(reducer, seed, steps, inner_steps, reducer.method.worker):
            if statistics.position > position and not math.isnan(statistics.loss):
                position = statistics.position
                print(f"position {position:3}  loss {statistics.loss:.3f}", flush=True)
            if 0 < run.rounds <= statistics.position:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, default=4, help="workers in one process (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="inner steps of each worker (default 150)"
    )
    parser.add_argument(
        "--invite", help="invite of the run to join; without it, workers run in one process"
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path("example-state"),
        help="folder for the peer's state, with --invite (default %(default)s)",
    )
    options = parser.parse_args()
    if options.invite:
        networked(options.invite, options.state_dir, options.steps)
    else:
        in_process(options.workers, options.steps)


if __name__ == "__main__":
    main()
