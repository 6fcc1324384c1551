"""Measure and check on one CUDA GPU what no CPU can tell; see `scripts/gpu`.

Each step's rows are kept in build/gpu/results.json when it ends. A step that is finished for this
commit and GPU is not run again; one that would not fit into the time that is left is not begun.
The exit code is 1 if something that was checked does not hold, 2 without a GPU, 3 if steps are
left for another call, 130 after Ctrl-C.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import gpu_results
import gpu_runs
import gpu_steps
from circumstances import commit, today
from gpu_place import ROOT, Place, dry_run, gpu
from gpu_results import Found, Kept, Outcome

from atoll.peer.errors import DeviceError

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
FILE = "results.json"
LONGER = 2.0  # times its own minutes that a step which can stop may take
LEFT = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class Call:
    """Hold the arguments of a step."""

    place: Place
    folder: Path
    deadline_s: float
    """of the monotonic clock; heeded by steps that can stop and continue"""

    @property
    def sizes(self) -> gpu_steps.Sizes:
        """Return the amounts that steps measure."""
        return gpu_steps.TINY if self.place.is_dry else gpu_steps.REAL


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, with what it takes on an H100."""

    name: str
    minutes: float
    title: str
    run: Callable[[Call], Found]


def bits(call: Call) -> Found:
    """Compare bits in this process, then those of peers on the GPU and on the CPU."""
    here = gpu_steps.bits(call.place, call.sizes)
    plan = gpu_runs.TINY_PLAN if call.place.is_dry else gpu_runs.MIXED_PLAN
    there = gpu_runs.processes(call.place, plan, call.folder)
    return Found(rows=[*here.rows, *there.rows], checks=[*here.checks, *there.checks])


def peers(call: Call) -> Found:
    """Train peers on one GPU, and kill one."""
    plan = gpu_runs.TINY_KILLED_PLAN if call.place.is_dry else gpu_runs.FOUR_PLAN
    return gpu_runs.processes(call.place, plan, call.folder)


def mfu(preset: str, call: Call) -> Found:
    """Time the inner steps of a preset."""
    return gpu_steps.mfu(call.place, call.sizes, "nano" if call.place.is_dry else preset)


def method(text: str, call: Call) -> Found:
    """Train by one method."""
    settings = gpu_runs.TINY_SETTINGS if call.place.is_dry else gpu_runs.FULL
    return gpu_runs.method(call.place, text, settings, call.folder, deadline_s=call.deadline_s)


STEPS = (
    Step(
        name="tests",
        minutes=3,
        title="tests marked `cuda`",
        run=lambda call: gpu_steps.tests(call.place, call.folder),
    ),
    Step(name="bits", minutes=2, title="equal bits on GPU and CPU", run=bits),
    Step(
        name="codecs",
        minutes=1,
        title="codecs against copies",
        run=lambda call: gpu_steps.codecs(call.place, call.sizes),
    ),
    Step(
        name="window",
        minutes=3,
        title="the end of a window, saving and encoding at a billion parameters",
        run=lambda call: gpu_steps.window(call.place, call.sizes, call.folder),
    ),
    Step(name="peers", minutes=6, title="four peers on one GPU, one killed", run=peers),
    *(
        Step(
            name=f"mfu-{preset}",
            minutes=minutes,
            title=f"model FLOPs of {preset}",
            run=partial(mfu, preset),
        )
        for preset, minutes in (("150m", 1), ("350m", 1.5), ("1b", 2.5))
    ),
    *(
        Step(
            name=text,
            minutes=4,
            title=f"`{text}` at 30M parameters and 300M tokens",
            run=partial(method, text),
        )
        for text in ("ddp", "diloco", "muloco", "sparseloco", "streaming")
    ),
)
TITLES = {step.name: step.title for step in STEPS}


class Session:
    """One call of the script."""

    def __init__(self, place: Place, folder: Path, *, minutes: float) -> None:
        """Begin to count the minutes.

        Args:
            place: what to measure.
            folder: for results and what steps leave unfinished.
            minutes: that the call may take.
        """
        self.place, self.folder = place, folder
        self.kept = Kept(folder / FILE)
        self.ends_s = time.monotonic() + 60 * minutes
        self.outcomes: dict[str, Outcome] = {}
        """of all steps that this device has had at this commit, the missed ones too"""
        self.left: list[str] = []
        """steps for another call"""
        self.failed: list[str] = []
        """steps that ended in an error"""

    def run(self, steps: Sequence[Step], again: Sequence[str]) -> None:
        """Take steps in their order, without those that are finished or do not fit."""
        self.outcomes = self.kept.of(commit(), self.place.name)
        for number, step in enumerate(steps, start=1):
            head = f"[{number}/{len(steps)}] {step.name}"
            before = self.outcomes.get(step.name)
            if before is not None and before.is_complete and step.name not in again:
                say(f"{head}: done on {before.date}; --again {step.name} repeats it")
            elif time.monotonic() + 60 * step.minutes > self.ends_s:
                left_min = max(0.0, (self.ends_s - time.monotonic()) / 60)
                say(f"{head}: needs {step.minutes:g} min, {left_min:.0f} are left; left out")
                self.left.append(step.name)
            else:
                say(f"{head}: {step.title} (about {step.minutes:g} min)")
                self._take(step)

    def _take(self, step: Step) -> None:
        began_s = time.monotonic()
        deadline_s = min(self.ends_s, began_s + LONGER * 60 * step.minutes)
        self.place.forget()
        try:
            found = step.run(Call(place=self.place, folder=self.folder, deadline_s=deadline_s))
        except Exception:  # the other steps are worth the GPU's time all the same
            traceback.print_exc()
            self.failed.append(step.name)
            return
        outcome = Outcome(
            step=step.name,
            device=self.place.name,
            commit=commit(),
            date=today(),
            seconds=time.monotonic() - began_s,
            rows=found.rows,
            checks=[asdict(check) for check in self._judged(found)],
            is_complete=found.is_complete,
        )
        self.kept.keep(outcome)
        self.outcomes[step.name] = outcome
        if not found.is_complete:
            self.left.append(step.name)
        for line in (*gpu_results.table(outcome.rows), *(f"NOT MET {m}" for m in outcome.missed)):
            say(f"  {line}")

    def _judged(self, found: Found) -> list[gpu_results.Check]:
        """Return the checks; no speed of a dry run counts."""
        is_dry = self.place.is_dry
        return [replace(c, is_met=True) if is_dry and c.is_speed else c for c in found.checks]

    @property
    def code(self) -> int:
        """The exit code."""
        if self.failed or any(outcome.missed for outcome in self.outcomes.values()):
            return 1
        return LEFT if self.left else 0


def say(line: str) -> None:
    """Print a line about progress."""
    print(line, file=sys.stderr, flush=True)


def chosen(only: Sequence[str]) -> list[Step]:
    """Return the steps of these names, in the order of worth; all by default."""
    return [step for step in STEPS if not only or step.name in only]


def listed(session: Session) -> str:
    """Return all steps as text."""
    kept = session.kept.of(commit(), session.place.name)
    lines = [f"{'step':12}{'min':>5}  {'done':12}"]
    for step in STEPS:
        outcome = kept.get(step.name)
        state = "" if outcome is None else outcome.date if outcome.is_complete else "in part"
        lines.append(f"{step.name:12}{step.minutes:5g}  {state:12}{step.title}")
    return "\n".join(lines)


def save(outcomes: Sequence[Outcome], path: Path = PAGE) -> None:
    """Write the page and its rows; other devices' rows go with it."""
    gpu_results.store(path.with_suffix(".json"), list(outcomes))
    path.write_text(gpu_results.page(path.read_text(), list(outcomes), TITLES))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, names = arguments.add_argument, list(TITLES)
    add("--only", nargs="+", choices=names, default=[], metavar="STEP", help="Steps to run.")
    add(
        "--again",
        nargs="+",
        choices=names,
        default=[],
        metavar="STEP",
        help="Steps to repeat although they are done.",
    )
    add(
        "--minutes",
        type=float,
        default=40.0,
        help="Minutes for this call (default: 40); what does not fit is left for the next one.",
    )
    add("--list", action="store_true", help="List of the steps; nothing runs.")
    add("--dry-run", action="store_true", help="Tiny sizes on a fake device of the CPU.")
    add(
        "--out",
        type=Path,
        default=ROOT / "build" / "gpu",
        help="Folder of the results (default: build/gpu).",
    )
    add("--json", action="store_true", help="Outcomes as JSON on stdout.")
    add("--save", action="store_true", help="Also write docs/benchmarks/gpu.json and gpu.md.")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parser().parse_args(words)
    if options.dry_run and options.save:
        say("gpu: --save needs a GPU, and --dry-run uses none; leave one of them out")
        return 2
    try:
        place = dry_run() if options.dry_run else nullcontext(gpu())
    except DeviceError as error:
        say(f"gpu: {error}; `--dry-run` tries all steps on the CPU")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with place as here:
        session = Session(here, options.out, minutes=options.minutes)
        if options.list:
            print(listed(session))
            return 0
        try:
            session.run(chosen(options.only), options.again)
        except KeyboardInterrupt:
            say(f"gpu: interrupted; {len(session.outcomes)} steps are kept in {session.kept.path}")
            return 130
    if options.save:
        save(session.kept.all())
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in session.outcomes.values()]))
    for name, steps in (("failed", session.failed), ("left for another call", session.left)):
        if steps:
            say(f"gpu: {name}: {', '.join(steps)}")
    return session.code


if __name__ == "__main__":
    sys.exit(main())
