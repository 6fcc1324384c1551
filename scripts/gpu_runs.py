"""Steps of `scripts/gpu` that train: processes on one GPU, and methods at equal tokens."""

import asyncio
import math
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gpu_place import ROOT, Place, activity
from gpu_results import Check, Facts, Found
from gpu_steps import TINY_MODEL

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import RunStatus
from atoll.peer.lab.baseline import BaselinePoint, baseline
from atoll.peer.lab.children import ATOLL
from atoll.peer.lab.demo import Demo, DemoOptions, DemoRun, Feed
from atoll.peer.lab.simulate import SAVE_EVERY_S, Bench, Folder, Simulation, parse_methods
from atoll.peer.lab.simulation_settings import Settings
from atoll.peer.lab.summary import chains_equal, read_log, recovered_peers, states_equal
from atoll.peer.training.opening import open_corpus
from atoll.peer.training.permission import Allowed

LOOK_S = 0.5
RUN_S = 900.0  # for a run of processes; a demo that makes no progress ends itself earlier
WARM_ROUNDS = 2  # in the first windows peers load kernels and measure their line
PEER_BYTES = 105  # of host memory a parameter and peer, at most (docs/benchmarks/sizes.md has less)
CLOSE = 0.1  # by which the peers' own figure may exceed the GPU's
BYTES_A_STEP = 4  # a parameter's gradient in fp32

MIXED = (sys.executable, str(Path(__file__).resolve().parent / "gpu_peer.py"))

TINY_TEXT = str(ROOT / "docs")


def say(line: str) -> None:
    """Print a line about progress."""
    print(line, file=sys.stderr, flush=True)


# --- processes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of processes on this machine."""

    presets: tuple[str, ...]
    """The largest first; the first one that the host's memory holds is trained."""
    peers: int
    rounds: int
    inner_steps: int
    batch_size: int
    seq_len: int
    kills: bool
    overrides: Mapping[str, int] = field(default_factory=dict)
    """fields of the preset"""
    source: str = "stdlib"
    program: tuple[str, ...] = ATOLL


MIXED_PLAN = Plan(
    presets=("nano",),
    peers=2,
    rounds=6,
    inner_steps=10,
    batch_size=4,
    seq_len=64,
    kills=False,
    program=MIXED,
)
FOUR_PLAN = Plan(
    presets=("150m", "30m"),
    peers=4,
    rounds=10,
    inner_steps=200,
    batch_size=8,
    seq_len=512,
    kills=True,
)
TINY_PLAN = Plan(
    presets=("nano",),
    peers=2,
    rounds=3,
    inner_steps=2,
    batch_size=1,
    seq_len=16,
    kills=False,
    overrides=TINY_MODEL,
    source=TINY_TEXT,
    program=MIXED,
)
TINY_KILLED_PLAN = replace(
    TINY_PLAN,
    peers=3,  # two are a quorum without the one that is killed
    rounds=18,  # most of them while it starts again
    inner_steps=100,
    kills=True,
    program=ATOLL,
)


def spec_of(plan: Plan, preset: str) -> RunSpec:
    """Return the spec of a plan's run."""
    return RunSpec.from_dict(
        {
            "run": {"name": "gpu", "rounds": plan.rounds},
            "model": {"preset": preset, "overrides": dict(plan.overrides)},
            "data": {"source": plan.source, "seq_len": plan.seq_len},
            "inner": {"batch_size": plan.batch_size, "warmup_steps": 2},
            "outer": {"inner_steps": plan.inner_steps},
            # All share a machine, which may be busy; and a killed peer also needs the snapshot.
            "round": {
                "min_peers": plan.peers,
                "stall_s": 5.0,
                "grace_s": 30.0,
                "snapshot_every": 2,
                "log_mb": 1,
            },
            "coordinator": {
                "listen": "127.0.0.1:0",
                "dht_listen": "127.0.0.1:0",
                "advertise": "127.0.0.1",
            },
        }
    )


class Looks:
    """Hold a status of a run, and the time at which it came."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, RunStatus]] = []

    async def __call__(self, feed: Feed) -> bool:
        """Look until the run is finished."""
        while True:
            with suppress(CoordinatorError):
                status = await feed()
                if not self.seen or status.position > self.seen[-1][1].position:
                    say(f"  round {status.position} of {status.rounds_total}")
                self.seen.append((time.monotonic(), status))
                if status.state == "finished":
                    return True
            await asyncio.sleep(LOOK_S)

    def steady(self) -> list[tuple[float, RunStatus]]:
        """Return the looks between the first rounds and the last one."""
        return [
            (at_s, status)
            for at_s, status in self.seen
            if WARM_ROUNDS <= status.position < status.rounds_total
        ]

    def reported(self) -> float | None:
        """Return the mean utilisation that the peers reported meanwhile."""
        found = [status.utilisation for _, status in self.steady() if status.utilisation]
        return sum(found) / len(found) if found else None


def processes(place: Place, plan: Plan, folder: Path) -> Found:
    """Run a coordinator and peers as people start them; sample the GPU beside them."""
    preset = next((p for p in plan.presets if _fits(place, plan, p)), plan.presets[-1])
    spec = spec_of(plan, preset)
    out = folder / f"run-{plan.peers}-{'killed' if plan.kills else 'mixed'}"
    shutil.rmtree(out, ignore_errors=True)  # of an attempt that was interrupted
    demo = Demo(
        DemoOptions(
            spec=spec,
            peers=plan.peers,
            out=out,
            device=place.for_processes,
            chaos=plan.kills,
            program=plan.program,
        ),
        say=lambda line: say(f"  {line}"),
    )
    looks, sampler = Looks(), activity(place)

    async def run() -> DemoRun | None:
        async with asyncio.timeout(RUN_S):
            return await demo.run(looks)

    with sampler or nullcontext():
        finished = asyncio.run(run())
    assert finished is not None, "nobody quits"
    checkpoint = load_checkpoint(finished.checkpoint)
    entries = read_log(finished, checkpoint)
    times = [at_s for at_s, _ in looks.steady()]
    busy = sampler.mean(times[0], times[-1]) if sampler is not None and times else None
    row: Facts = {
        "preset": preset,
        "parameters": finished.status.params,
        "peers": plan.peers,
        "devices": ", ".join(sorted({p.device for p in finished.status.peers})),
        "rounds": len(entries),
        "steps_a_window": plan.inner_steps,
        "killed": finished.kill.peer if finished.kill else None,
        "recovered": recovered_peers(finished, entries),
        "reported": looks.reported(),
        "busy": busy,
        "busy_by": sampler.source if sampler is not None else "nothing",
        "seconds": finished.seconds,
        "root": checkpoint.state.root().hex()[:16],
    }
    shutil.rmtree(out)  # gigabytes
    equal = (chains_equal(finished, entries), states_equal(finished, checkpoint))
    return Found(rows=[row], checks=run_checks(plan, row, *equal))


def _fits(place: Place, plan: Plan, preset: str) -> bool:
    sizes = {"nano": 1e6, "30m": 31e6, "150m": 154e6}
    return PEER_BYTES * plan.peers * sizes[preset] <= place.free_bytes()[1]


def run_checks(plan: Plan, row: Facts, chains: bool, states: bool) -> list[Check]:
    """Return what must hold of a finished run."""
    checks = [
        Check(
            name=f"{plan.peers} peers: {what}",
            got="equal" if is_met else "different",
            expected="equal",
            is_met=is_met,
        )
        for what, is_met in (("hash chains", chains), ("state roots", states))
    ]
    if plan.kills:
        came_back = row["killed"] is not None and row["recovered"] == 1
        checks.append(
            Check(
                name="killed peer",
                got="came back" if came_back else "did not come back",
                expected="came back",
                is_met=came_back,
            )
        )
        busy, reported = row["busy"], row["reported"]
        if busy is not None and reported is not None:
            checks.append(
                Check(
                    name="utilisation",
                    got=f"GPU {busy:.0%}, reported {reported:.0%}",
                    expected=f"reported at most {CLOSE:.0%} above the GPU's",
                    is_met=reported <= busy + CLOSE,
                    is_speed=True,
                )
            )
    return checks


# --- methods


FULL = Settings(
    workers=4,
    tokens=300_000_000,
    inner_steps=30,
    batch_size=16,
    seq_len=1024,
    model="30m",
    lr=1e-3,
)
TINY_SETTINGS = Settings(
    workers=2,
    tokens=2 * 12 * 2 * 16,  # two windows
    inner_steps=6,  # longer than the delay of `streaming`
    batch_size=2,
    seq_len=16,
    model="nano",
    overrides=TINY_MODEL,
    source=TINY_TEXT,
    points=1,
    valid_batches=1,
)
UNIFORM = math.log(256)  # the loss of a model that knows nothing


class OutOfTime(Exception):
    """The time of this call is over."""


def method(
    place: Place, text: str, settings: Settings, folder: Path, *, deadline_s: float
) -> Found:
    """Train all tokens by one method; stop at a time of the monotonic clock, to continue later."""
    trained = data_parallel if text == "ddp" else simulated
    row, is_complete = trained(place, text, settings, folder / "methods", deadline_s)
    if not is_complete:
        return Found(rows=[row], is_complete=False)
    loss = row["valid_loss"]
    check = Check(
        name=f"{text}: loss",
        got=f"{loss:.4f}",
        expected=f"below {UNIFORM:.2f}, that of a model that knows nothing",
        is_met=loss < UNIFORM,
        is_speed=True,
    )
    return Found(rows=[row], checks=[check])


def simulated(
    place: Place, text: str, settings: Settings, folder: Path, deadline_s: float
) -> tuple[Facts, bool]:
    """Train by a method with windows; its rounds run in this process."""
    bench = Bench(settings, place.choice, compiles=not place.is_dry)
    (chosen,) = parse_methods(text, settings)
    store = Folder(folder, settings)
    result = store.result(chosen, 0)
    if result is None:
        simulation = Simulation(bench, chosen, 0)
        store.resume(simulation)
        saved_s = time.monotonic()
        while not simulation.finished:
            if time.monotonic() > deadline_s:
                store.save(simulation)
                return {"method": text, "steps": simulation.step, "of": settings.steps}, False
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                say(f"  {text}: step {simulation.step} of {settings.steps}")
                store.save(simulation)
                saved_s = time.monotonic()
            simulation.advance()
        result = simulation.result()
        store.keep(result, chosen)
    facts = asdict(result)
    return {
        "method": text,
        "parameters": facts["params"],
        "workers": settings.workers,
        "tokens": result.points[-1].tokens,
        "valid_loss": result.valid_loss,
        "mb_sent": result.sent_bytes / 1e6,
        "tokens_s": result.points[-1].tokens / max(result.seconds, 0.1),
        "spec": result.spec,
    }, True


def data_parallel(
    place: Place, text: str, settings: Settings, folder: Path, deadline_s: float
) -> tuple[Facts, bool]:
    """Train data parallel on the same streams: one model with the gradients of all workers.

    The simulation would move all gradients to the host in each step.
    """
    del folder
    rounds = settings.steps // settings.inner_steps
    spec = RunSpec.from_dict(
        {
            "run": {"rounds": rounds, "seed": 0},
            "model": {"preset": settings.model, "overrides": dict(settings.overrides)},
            "data": {"source": settings.source, "seq_len": settings.seq_len},
            "inner": {
                "lr": settings.lr,
                "warmup_steps": int(settings.warmup * settings.steps),
                "min_lr_ratio": settings.min_lr_ratio,
                "clip_norm": settings.clip_norm,
                "batch_size": settings.batch_size,
                "compile": not place.is_dry,
            },
            "outer": {"inner_steps": settings.inner_steps},
        }
    )
    done = 0

    def progress(point: BaselinePoint) -> None:
        nonlocal done
        done = point.position
        if time.monotonic() > deadline_s and done < rounds:
            raise OutOfTime

    names = [f"worker {index}" for index in range(settings.workers)]
    try:
        result = baseline(
            spec,
            peer_ids=names,
            device=place.choice,
            corpus=open_corpus(spec, Allowed.everything_in(spec)),
            valid_batches=settings.valid_batches,
            progress=progress,
        )
    except OutOfTime:
        steps = done * settings.inner_steps
        return {"method": text, "steps": steps, "of": settings.steps}, False
    params = _num_params(settings)
    sent = 2 * (settings.workers - 1) / settings.workers * BYTES_A_STEP * params * result.steps
    return {
        "method": text,
        "parameters": params,
        "workers": settings.workers,
        "tokens": result.tokens,
        "valid_loss": result.valid_loss,
        "mb_sent": sent / 1e6,
        "tokens_s": result.tokens / max(result.seconds, 1e-9),
        "spec": "one model, the gradients of all workers",
    }, True


def _num_params(settings: Settings) -> int:
    from atoll.peer.training.models import preset

    return preset(settings.model, settings.overrides, vocab_size=256, seq_len=1).num_params
