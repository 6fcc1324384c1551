#!/usr/bin/env python3
"""One peer of `scripts/bench_utilisation.py`: a training loop whose inner steps only take time.

    utilisation_host.py INVITE STATE_DIR '{"name": "a", "step_s": 0.05, "warmup": 2, "windows": 4}'

The loop is a custom training loop over `atoll.peer.daemon.network.connect`; everything except the
arithmetic of the model is as in a run. An inner step changes a part of the parameters, so that a
window's pseudo-gradient has no zeros, and sleeps for the rest of its time. The program reports in
lines of JSON on stdout: once when it is warm, and at the end with its measurements since then.
"""

import json
import logging
import sys
import time
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from atoll.optim import inner
from atoll.peer.daemon.beside.trainer_side import SeatReducer
from atoll.peer.daemon.network import connect
from atoll.peer.training.opening import build_model

TOKENS_PER_STEP = 8 * 1024  # the same for all peers, so all weigh the same
NOISE = 1e-3
SLEEPS = 50  # the least late shows when a thread wakes up if its core is free
VOCABULARY = 256  # of bytes

Facts = dict[str, Any]


class EmulatedTraining:
    """Inner steps of a set length.

    A sleep of 22 ms takes 22.1 on an idle machine. The end of each step is therefore a loop that
    polls the clock, so that a step is late only if no core was free.
    """

    def __init__(self, model: nn.Module, step_s: float) -> None:
        self.step_s = step_s
        self._params = list(model.parameters())
        self._noise = NOISE * torch.randn(max(param.numel() for param in self._params))
        self._late_s = min(lateness_s(0.002) for _ in range(SLEEPS))
        self._step = 0
        self.overslept_s = 0.0
        """how much later steps ended than planned, because the machine was busy"""

    def step(self, inner_steps: int) -> None:
        """Change one of `inner_steps` parts of the parameters; wait until the step is over."""
        ends_s = time.monotonic() + self.step_s
        with torch.no_grad():
            for param in self._params[self._step % inner_steps :: inner_steps]:
                param.add_(self._noise_like(param))
        self._step += 1
        time.sleep(max(0.0, ends_s - self._late_s - time.monotonic()))
        while time.monotonic() < ends_s:
            pass
        self.overslept_s += time.monotonic() - ends_s

    def _noise_like(self, param: Tensor) -> Tensor:
        return self._noise[: param.numel()].view(param.shape)


def lateness_s(sleep_s: float) -> float:
    """Return how late a sleep ends."""
    ends_s = time.monotonic() + sleep_s
    time.sleep(sleep_s)
    return time.monotonic() - ends_s


def tell(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def train(reducer: SeatReducer, told: Facts) -> None:
    """Train until the last measured window has ended, and report the measurements."""
    spec = reducer.spec
    model, inner_steps = build_model(spec, VOCABULARY), spec.outer.inner_steps
    still = inner.build("sgd", model, lr=0.0)
    worker = reducer.method.worker(model, still, reducer, inner_steps=inner_steps)
    emulated = EmulatedTraining(model, told["step_s"])

    def window(count: int) -> float:
        for _ in range(count * inner_steps):
            emulated.step(inner_steps)
            worker.advance(tokens=TOKENS_PER_STEP, loss=2.0)
        return time.monotonic()

    began_s = window(1)
    while worker.statistics().included < told["warmup"]:
        began_s = window(1)
    before, overslept_s = worker.statistics(), emulated.overslept_s
    tell({"warm": True})
    seconds = window(told["windows"]) - began_s
    after = worker.statistics()
    tell(
        {
            "utilisation": told["windows"] * inner_steps * told["step_s"] / seconds,
            "rounds": after.position - before.position,
            "included": after.included - before.included,
            "overslept": (emulated.overslept_s - overslept_s) / seconds,
            "waited": (after.wait_s - before.wait_s) / seconds,
            "encode_s": reducer.encode_s,
            "params": worker.layout.numel,
            "method": reducer.method.spec,
        }
    )
    sys.stdin.readline()  # the others may not have finished yet


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    invite, state_dir, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with closing(connect(invite, state_dir=state_dir, name=told["name"])) as reducer:
        train(reducer, told)


if __name__ == "__main__":
    main()
