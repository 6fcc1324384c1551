"""Run peers of speeds 1, 2 and 4 with equal windows and with windows by their speed.

    ./scripts/bench windows                        both, 16 rounds each: about six minutes
    ./scripts/bench windows --rounds 30 --json

The coordinator and the peers are processes, started as `atoll demo` starts them. The model is nano
with small batches. The duration of a step depends on its peer's speed and is mostly sleep, so other
programs on the machine change little.

    all here      rounds with a contribution of every peer
    waited        fraction of the time in which a peer waited for others, mean and maximum
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from atoll.peer.training.models import model

SPEEDS = (1.0, 2.0, 4.0)
WINDOWS = ("equal", "deadline")
PACE = "ATOLL_BENCH_STEP_S"  # environment variable of a peer's process


class Paced(nn.Module):
    """A model whose training steps begin at least this many seconds after one another."""

    def __init__(self, inner: nn.Module, step_s: float) -> None:
        """`inner` is the model that trains."""
        super().__init__()
        self.inner, self._step_s, self._next_s = inner, step_s, 0.0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Run the inner model; sleep if a step would begin too soon."""
        if self.training:
            now_s = time.monotonic()
            time.sleep(max(0.0, self._next_s - now_s))
            self._next_s = max(now_s, self._next_s) + self._step_s
        return self.inner(tokens_BT)


@model
def paced(*, vocab_size: int, seq_len: int) -> nn.Module:
    """Build the model, as named by `model.custom`."""
    from atoll.peer.training import models

    config = models.preset("nano", {}, vocab_size=vocab_size, seq_len=seq_len)
    return Paced(models.Decoder(config), float(os.environ.get(PACE, "0")))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    windows: str
    rounds: int
    members: float
    """mean per round"""
    all_here: int
    tokens: int
    seconds: float
    """from the first decided round to the last"""
    waited: tuple[float, ...]
    """fraction of the time, per peer, the slowest first"""
    valid_loss: float


def spec_of(options, windows):
    from atoll.coordinator.run.spec import RunSpec

    return RunSpec.from_dict(
        {
            "run": {"name": "windows", "rounds": options.rounds},
            "model": {"custom": "bench_windows:paced"},
            "outer": {"inner_steps": options.inner_steps, "windows": windows},
            "inner": {"lr": 1e-3, "warmup_steps": 2 * options.inner_steps, "batch_size": 4},
            "round": {"min_peers": len(SPEEDS), "stall_s": 3.0},
            "coordinator": {
                "listen": "127.0.0.1:0",
                "dht_listen": "127.0.0.1:0",
                "advertise": "127.0.0.1",
            },
        }
    )


async def run(options, windows, out):
    """Run one setting; return its row."""
    from atoll.coordinator.checkpoints import load_checkpoint
    from atoll.peer.lab.demo import Demo, DemoOptions
    from atoll.peer.lab.summary import held_out_loss, read_log

    spec = spec_of(options, windows)
    program = (sys.executable, str(Path(__file__)), "--as-atoll", str(options.step_ms / 1000))
    demo = Demo(DemoOptions(spec=spec, peers=len(SPEEDS), out=out, program=program), say=print)

    async def shown(feed):
        while (await feed()).state != "finished":
            await asyncio.sleep(0.5)
        return True

    done = await demo.run(shown)
    checkpoint = load_checkpoint(done.checkpoint)
    present = [
        sum(member.weight > 0 for member in entry.members) for entry in read_log(done, checkpoint)
    ]
    history = done.status.history
    return Row(
        windows=windows,
        rounds=len(present),
        members=sum(present) / len(present),
        all_here=sum(count == len(SPEEDS) for count in present),
        tokens=done.status.tokens_total,
        seconds=history[-1].at - history[0].at,
        waited=tuple(1 - peer.utilisation for peer in sorted(done.status.peers, key=name)),
        valid_loss=held_out_loss(spec, checkpoint),
    )


def name(peer):
    return peer.name


def line(row):
    waited = f"{sum(row.waited) / len(row.waited):.1%} ({max(row.waited):.1%})"
    return (
        f"{row.windows:10}{row.rounds:8}{row.members:10.2f}{row.all_here:10}"
        f"{row.tokens / 1e6:10.2f}M{row.seconds:8.0f} s{row.tokens / row.seconds:10.0f}"
        f"{waited:>17}{row.valid_loss:10.3f}"
    )


def as_atoll(step_s, arguments):
    """Run `atoll ARGUMENTS` as a process of the run, a peer's at its speed."""
    from atoll.peer.cli.main import main

    if arguments[0] == "peer":
        index = int(arguments[arguments.index("--name") + 1].rsplit("-")[-1])
        os.environ[PACE] = str(step_s * max(SPEEDS) / SPEEDS[index])
    return main(arguments)


def main():
    if sys.argv[1:2] == ["--as-atoll"]:
        return as_atoll(float(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=16, help="rounds per run (default %(default)s)"
    )
    parser.add_argument(
        "--inner-steps",
        type=int,
        default=12,
        help="inner steps per window, H (default %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=300.0,
        help="step time of the fastest peer, ms (default 300)",
    )
    parser.add_argument("--windows", choices=WINDOWS, help="only this kind of windows")
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON")
    options = parser.parse_args()
    here = str(Path(__file__).parent)  # for child processes too, because of `model.custom`
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    print(
        f"{'windows':10}{'rounds':>8}{'members':>10}{'all here':>10}{'tokens':>11}{'time':>10}"
        f"{'tok/s':>10}{'waited (most)':>17}{'held out':>10}"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="atoll-windows-") as folder:
        for windows in [options.windows] if options.windows else WINDOWS:
            rows.append(asyncio.run(run(options, windows, Path(folder) / windows)))
            print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
