"""Seeds one after another, and what is found: printed, replayed, shrunk.

hunt(Search(seeds=range(1000), ...), tell=print)   all of them, or until the time is over
apart(told, plan)                                   one of them, with all that happened in it
shrink(plan, ...)                                   the same failure with fewer faults
"""

from __future__ import annotations

import faulthandler
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from atoll.dht.folders import claim_folder
from atoll.peer.lab.hunt import plans
from atoll.peer.lab.hunt.bugs import BugName, with_bug
from atoll.peer.lab.hunt.plans import RunPlan
from atoll.peer.lab.hunt.world import RunVerdict, prepare, run

MEMORY = Path("/dev/shm")  # files of a simulation are small, and many are synced
Result = TypeVar("Result")
FOLDER_PREFIX = "hunt-"
AT_ONCE = 2  # seeds that wait for each process
STDERR = 2  # the file itself: `sys.stderr` may have been replaced by what has none
ENDS = "a run ends"
ENDS_S = 1800.0  # seconds of real time; a run of four virtual minutes takes less than one


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which seeds to run, and how."""

    first: int = 0
    seeds: int = 100
    minutes: float = 0.0
    """Minutes of real time, after which no further seed begins; 0 runs all seeds."""
    virtual_minutes: float | None = None
    """Minutes of faults in each run; None: drawn from the seed."""
    jobs: int = 1
    bug: BugName | None = None
    until_found: bool = False


class RunLost(RuntimeError):
    """A run whose process has ended without telling what came of it."""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """The outcome of one seed, which travels between processes."""

    seed: int
    rule: str
    """The rule that was broken; empty if none was."""
    text: str
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    positions: int = 0
    epochs: int = 0
    resumed_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    story: str = ""
    """The digest of all that happened, by which a replay can be compared (`digest_of`)."""


@dataclass(frozen=True, kw_only=True)
class ToldRun:
    """A run with its story, which travels between processes."""

    lines: tuple[str, ...]
    """The settings, the faults and the events."""
    rule: str
    text: str
    cause: str
    """The traceback of the failure behind a broken rule; empty if there is none."""
    virtual_s: float
    story: str
    """The digest of `lines`."""


@dataclass(kw_only=True)
class HuntSummary:
    """The outcome of all seeds."""

    runs: int = 0
    found: list[SeedResult] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    positions: int = 0
    epochs: int = 0
    longest_resume_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, result: SeedResult) -> None:
        """Count a result."""
        self.runs += 1
        if result.rule:
            self.found.append(result)
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        self.positions += result.positions
        self.epochs += result.epochs
        self.longest_resume_s = max(self.longest_resume_s, result.resumed_s)
        self.faults += result.faults

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "runs": self.runs,
            "found": [
                {"seed": each.seed, "rule": each.rule, "text": each.text, "story": each.story}
                for each in self.found
            ],
            "virtual_hours": round(self.virtual_s / 3600, 2),
            "cpu_s": round(self.cpu_s, 1),
            "wall_s": round(self.wall_s, 1),
            "virtual_hours_per_cpu_s": round(self.virtual_s / 3600 / max(self.cpu_s, 1e-9), 4),
            "positions": self.positions,
            "epochs": self.epochs,
            "longest_resume_s": round(self.longest_resume_s),
            "faults": dict(sorted(self.faults.items())),
        }


def run_plan(plan: RunPlan, bug: BugName | None = None) -> RunVerdict:
    """Run one plan, in a folder of its own."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = stack.enter_context(_own_folder())
        if bug is not None:
            stack.enter_context(with_bug(bug))
        return run(plan, folder / "run")


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a folder in memory, and remove it at the end; a hunt that is killed leaves it."""
    folder, lock = claim_folder(FOLDER_PREFIX, MEMORY if MEMORY.is_dir() else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a child of this process, which has run no seed.

    A run leaves its process changed: what it has imported or remembered on the way, a later one
    does without. That one, run alone, would not be the same again.

    Raises:
        RunLost: the child has ended without a result, or was ended, with its stacks on the error
            output: code that waits for a thread waits for ever, as there is only one.
    """
    prepare()
    receiver, sender = get_context("fork").Pipe(duplex=False)

    def call() -> None:
        faulthandler.dump_traceback_later(ENDS_S, exit=True, file=STDERR)
        sender.send(function(*arguments))

    child = get_context("fork").Process(target=call)
    child.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        child.join()
        raise RunLost(f"a run's process ended with {child.exitcode}") from None
    finally:
        receiver.close()
        child.join()
    return result


def run_seed(
    seed: int, virtual_minutes: float | None = None, bug: BugName | None = None
) -> SeedResult:
    """Run one seed."""
    began_s = time.process_time()
    verdict = run_plan(plans.draw(seed, minutes=virtual_minutes), bug)
    broken = verdict.broken
    return SeedResult(
        seed=seed,
        rule=broken.rule if broken is not None else "",
        text=str(broken) if broken is not None else "",
        virtual_s=verdict.virtual_s,
        cpu_s=time.process_time() - began_s,
        positions=verdict.positions,
        epochs=verdict.epochs,
        resumed_s=verdict.resumed_s,
        faults=verdict.faults,
        story=digest_of(story_of(verdict)),
    )


def told(plan: RunPlan, bug: BugName | None = None) -> ToldRun:
    """Run one plan and tell what happened in it."""
    verdict = run_plan(plan, bug)
    broken, lines = verdict.broken, story_of(verdict)
    cause = broken.__cause__ if broken is not None else None
    return ToldRun(
        lines=lines,
        rule=broken.rule if broken is not None else "",
        text=str(broken) if broken is not None else "",
        cause="".join(traceback.format_exception(cause)) if cause is not None else "",
        virtual_s=verdict.virtual_s,
        story=digest_of(lines),
    )


def broken_rule(plan: RunPlan, bug: BugName | None = None) -> str:
    """Return the rule that a plan breaks; empty if it breaks none."""
    broken = run_plan(plan, bug).broken
    return broken.rule if broken is not None else ""


def hunt(search: Search, tell: Callable[[SeedResult], None]) -> HuntSummary:
    """Run seeds, in processes of their own if there are several jobs."""
    began_s, summary = time.monotonic(), HuntSummary()
    results = _one_after_another(search) if search.jobs == 1 else _beside_each_other(search)
    for result in results:
        summary.add(result)
        tell(result)
        if search.until_found and result.rule:
            break
    summary.wall_s = time.monotonic() - began_s
    return summary


def _seeds(search: Search) -> Iterator[int]:
    began_s = time.monotonic()
    for seed in range(search.first, search.first + search.seeds):
        if search.minutes and time.monotonic() - began_s > search.minutes * 60:
            return
        yield seed


def _run_apart(seed: int, search: Search) -> SeedResult:
    try:
        return apart(run_seed, seed, search.virtual_minutes, search.bug)
    except RunLost as lost:
        return SeedResult(seed=seed, rule=ENDS, text=f"{ENDS}: {lost}")


def _one_after_another(search: Search) -> Iterator[SeedResult]:
    for seed in _seeds(search):
        yield _run_apart(seed, search)


def _beside_each_other(search: Search) -> Iterator[SeedResult]:
    seeds, waiting = _seeds(search), set[Future[SeedResult]]()
    with ProcessPoolExecutor(search.jobs, mp_context=get_context("spawn")) as pool:
        try:
            while True:
                for seed in seeds:
                    waiting.add(pool.submit(_run_apart, seed, search))
                    if len(waiting) >= AT_ONCE * search.jobs:
                        break
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done:
                    yield each.result()
        finally:
            pool.shutdown(cancel_futures=True)


def shrink(
    plan: RunPlan, rule: str, *, bug: BugName | None = None, tries: int = 60
) -> tuple[RunPlan, int]:
    """Return a smaller plan that breaks the same rule, and how many were tried.

    Faults are left out by halves, quarters and so on; then the run heals after the last one.
    """
    num_tried, size = 0, max(1, len(plan.faults) // 2)

    def still_fails(candidate: RunPlan) -> bool:
        nonlocal num_tried
        num_tried += 1
        return apart(broken_rule, candidate, bug) == rule

    while True:
        start, has_shrunk = 0, False
        while start < len(plan.faults) and num_tried < tries:
            candidate = plan.without(range(start, start + size))
            if still_fails(candidate):
                plan, has_shrunk = candidate, True
            else:
                start += size
        if (size == 1 and not has_shrunk) or num_tried >= tries:
            break
        size = max(1, size // 2)
    shorter = plan.shortened()
    if shorter != plan and num_tried < tries and still_fails(shorter):
        plan = shorter
    return plan, num_tried


def story_of(verdict: RunVerdict) -> tuple[str, ...]:
    """Return what happened in a run, a line each, with its settings first."""
    plan = verdict.plan
    settings = (
        f"{plan.method} {plan.codec}, {plan.trainers} trainers, {plan.keepers} keepers, "
        f"{plan.step_s:g} s a step, latency {plan.latency_s:g} s, healed after {plan.lasts_s:g} s"
        + (f", {plan.units} units a pass" if plan.units else "")
    )
    return (settings, *map(str, plan.faults), "", *verdict.story)


def digest_of(lines: Iterable[str]) -> str:
    """Return 16 hex digits of the SHA-256 of a story."""
    return sha256("\n".join(lines).encode()).hexdigest()[:16]
