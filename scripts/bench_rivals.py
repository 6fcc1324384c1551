#!/usr/bin/env python3
"""Measure pipelines of others on the hosts and links of `bench pipeline`, and ours beside them.

    ./scripts/bench rivals                          everything (half an hour); needs root
    ./scripts/bench rivals --only ours,gpipe
    ./scripts/bench rivals --save                   also write docs/benchmarks/rivals.md and .json
    ./scripts/bench rivals --json                   the results as JSON on the last line

    ours      3 stages of 2 peers, int8: at 25 and 10 Mbit/s and 50 ms, with one peer killed, and
              with one slow peer
    gpipe     the same of torch.distributed.pipelining over gloo, bf16
    1f1b      the same with another schedule, without 10 Mbit/s
    star      the same by trainers that pass all activations on, as in SWARM; int8, one on each host
    star1     the undisturbed cases with one trainer
    slow      seconds a step where links bind as in the contest Protocol NanoGPT: ours with
              `subspace` and with 4 bits, 1F1B and GPipe with bf16

The model's slices mostly wait, as in `bench pipeline`. Exits with 2 if nothing can be measured.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_allreduce import lab_is_possible
from bench_nat import progress
from bench_pipeline import (
    EQUAL,
    MEASURE_S,
    RELINK_S,
    SETTLE_S,
)
from circumstances import circumstances, commit, today
from pipeline_lab import (
    ROWS,
    Flowing,
    Pipeline,
    busy_cores,
    counts,
    lab_of,
    link_of,
    running,
    spans,
)
from pipeline_others import HOSTS, Others, others, rate
from rows import put_between

from atoll.dht.testing.wan import WanLab, WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "rivals.json"
PAGE = SAVED.with_suffix(".md")
MARKS = ("<!-- rows of rivals.json -->", "<!-- end of rows -->")
FAST, SLOW = link_of(25.0, 50.0), link_of(10.0, 50.0)
# docs/benchmarks/rivals.md says why.
CONTEST = link_of(7.7, 50.0)
KILLED_S = 60.0
SLOW_FACTOR = 4.0
# One peer of the second stage: host 5 beside the coordinator, host 4 without one.
SLOW_PEER = replace(EQUAL, factors=(1.0, 1.0, 1.0, 1.0, SLOW_FACTOR, 1.0))
STRUCK = 5
CODECS = (("subspace(k=80)", "subspace(k=80)"), ("int4", "int4(rounding=random)"))
# A step of 64 microbatches takes others 20 to 60 s, and one whole step counts at least.
STEPS, MICROBATCHES_SEEN = 2, 30
BF16, INT8 = "bf16", "int8"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A system in one case, measured."""

    system: str
    codec: str
    case: str
    mbit: float
    rtt_ms: float
    tokens_per_s: float
    seconds: float
    """of the measurement"""
    link_use: float
    """of the busiest host's uplink, headers and repeated packets included"""
    dropped: float
    """fraction of the packets, at full queues of links"""
    busy_cores: float
    """of this machine"""
    note: str = ""


class Meter:
    """Bytes that links carry while something is measured."""

    def __init__(self, lab: WanLab) -> None:
        """Read the counts."""
        self._lab, self._began_s = lab, time.time()
        self._sent, self._dropped = list(lab.sent), lab.dropped

    def row(self, link: WanLink, tokens_per_s: float, busy: float, **names: str) -> Row:
        """Return a row of the time since."""
        took_s = time.time() - self._began_s
        used = [now - then for now, then in zip(self._lab.sent, self._sent, strict=True)]
        return Row(
            mbit=link.up,
            rtt_ms=2 * link.delay_ms,
            tokens_per_s=tokens_per_s,
            seconds=took_s,
            link_use=max(used[-HOSTS:]) * 8e-6 / took_s / link.up,
            dropped=(self._lab.dropped - self._dropped) * self._lab.mtu / max(1, sum(used)),
            busy_cores=busy,
            **names,
        )


def ours(seconds: float) -> Iterator[Row]:
    """Measure our pipeline in all cases."""
    with running(EQUAL, FAST, in_turn=True) as case:
        time.sleep(SETTLE_S)
        yield ours_now(case, "undisturbed", FAST, seconds)
        relink(case.lab, SLOW)
        yield ours_now(case, "undisturbed", SLOW, seconds)
        relink(case.lab, FAST)
        case.kill(STRUCK)
        yield ours_now(case, "one peer killed", FAST, KILLED_S)
    with running(SLOW_PEER, FAST, in_turn=True) as case:
        time.sleep(2 * SETTLE_S)
        yield ours_now(case, "one slow peer", FAST, seconds)


def ours_now(case: Flowing, name: str, link: WanLink, seconds: float) -> Row:
    """Measure our pipeline for some time, by what its first stage counts."""
    meter, from_s = Meter(case.lab), time.time()
    busy = busy_cores(lambda: time.sleep(seconds))
    until_s = time.time()
    found = [each for each in counts(list(case.looks())) if spans(each, from_s, until_s)]
    per_s = sum(each.rate(from_s, until_s) for each in found if each.stage == 0)
    pipeline = case.pipeline
    codec = pipeline.activations
    if codec != pipeline.gradients:
        codec += f", back {pipeline.gradients}"
    return meter.row(link, ROWS * per_s, busy, system="ours", codec=codec, case=name)


def relink(lab: WanLab, link: WanLink) -> None:
    """Give all hosts but a coordinator's another link, and wait until that is noticed."""
    lab.links[-HOSTS:] = [link] * HOSTS
    time.sleep(RELINK_S)


@contextmanager
def other(name: str, link: WanLink, pipeline: Pipeline = EQUAL) -> Iterator[Others]:
    """Run another system in a lab, until it has taken a step."""
    pace_s = [pipeline.forward_s[0] * factor for factor in pipeline.factors]
    with tempfile.TemporaryDirectory() as folder, lab_of([link] * HOSTS) as lab:
        with others(lab, Path(folder), name, pace_s) as case:
            case.wait(time.time(), 1)
            yield case


def rival(name: str, links: Sequence[WanLink] = (SLOW, FAST)) -> Callable[[float], Iterator[Row]]:
    """Return what measures another system in all cases."""

    def measured(seconds: float) -> Iterator[Row]:
        with other(name, links[0]) as case:
            for link in links:
                relink(case.lab, link)
                yield other_now(case, name, "undisturbed", link, seconds)
            yield killed(case, name)
        with other(name, FAST, SLOW_PEER) as case:
            yield other_now(case, name, "one slow peer", FAST, seconds)

    return measured


def other_now(case: Others, name: str, what: str, link: WanLink, seconds: float) -> Row:
    """Measure another system over whole steps, for some time at least."""
    meter, from_s = Meter(case.lab), time.time()

    def wait() -> None:
        time.sleep(seconds)
        case.wait(from_s, MICROBATCHES_SEEN if name.startswith("star") else STEPS)

    busy = busy_cores(wait)
    return meter.row(link, rate(case.since(from_s)), busy, **named(name), case=what)


def killed(case: Others, name: str) -> Row:
    """Kill a process of the second stage; return what the others do from then on."""
    meter, from_s = Meter(case.lab), time.time()
    case.kill(STRUCK - 1)
    ended: dict[int, float] = {}

    def watch() -> None:
        while time.time() < from_s + KILLED_S:
            for host in case.ended():
                ended.setdefault(host, time.time() - from_s)
            time.sleep(0.2)

    busy = busy_cores(watch)
    tokens = sum(n for marks in case.since(from_s) for _, n in marks)
    over = sorted(after_s for host, after_s in ended.items() if host != STRUCK - 1)
    note = f"{len(over)} of 5 others ended"
    note += f", after {over[0]:.0f} to {over[-1]:.0f} s" if over else ""
    per_s = tokens / KILLED_S
    return meter.row(FAST, per_s, busy, **named(name), case="one peer killed", note=note)


def named(name: str) -> dict[str, str]:
    """Return the fields of a row that name another system."""
    return {"system": name, "codec": INT8 if name.startswith("star") else BF16}


def one_trainer(seconds: float) -> Iterator[Row]:
    """Measure a star with a trainer on one host."""
    name = "star, one trainer"
    with other(name, FAST) as case:
        yield other_now(case, name, "undisturbed", FAST, seconds)
        relink(case.lab, SLOW)
        yield other_now(case, name, "undisturbed", SLOW, seconds)


def slow_links(seconds: float) -> Iterator[Row]:
    """Measure where links bind as in the contest."""
    for (activations, gradients), name in zip(CODECS, ("1F1B", "GPipe"), strict=True):
        pipeline = replace(EQUAL, activations=activations, gradients=gradients)
        with running(pipeline, CONTEST) as case:
            time.sleep(2 * SETTLE_S)
            yield ours_now(case, "contest", CONTEST, seconds)
        with other(name, CONTEST) as rival_case:
            yield other_now(rival_case, name, "contest", CONTEST, seconds)


CASES: dict[str, Callable[[float], Iterator[Row]]] = {
    "ours": ours,
    "gpipe": rival("GPipe"),
    "1f1b": rival("1F1B", (FAST,)),  # its steps take longest
    "star": rival("star"),
    "star1": one_trainer,
    "slow": slow_links,
}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with the most that ours does over what each other does."""
    mine: dict[tuple[str, float], float] = {}
    for row in (row for row in rows if row["system"] == "ours"):
        mine[place(row)] = max(mine.get(place(row), 0.0), row["tokens_per_s"])
    lines = [
        "| case | system | tokens/s | ours over it | uplink | dropped | cores | what happens "
        "| date, commit |",
        "|---" * 9 + "|",
    ]
    for row in sorted(rows, key=lambda row: list(map(place, rows)).index(place(row))):
        told = mine.get(place(row))
        ratio = f"{told / row['tokens_per_s']:.2f}" if told and row["tokens_per_s"] else ""
        lines.append(
            f"| {row['case']}, {row['mbit']:g} Mbit/s, {row['rtt_ms']:g} ms "
            f"| {row['system']}, {row['codec']} | {row['tokens_per_s']:,.0f} "
            f"| {ratio if row['system'] != 'ours' else ''} | {row['link_use']:.0%} "
            f"| {row['dropped']:.1%} | {row['busy_cores']:.1f} | {row['note']} "
            f"| {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)


def place(row: dict[str, Any]) -> tuple[str, float]:
    """Return what compared rows share."""
    return row["case"], row["mbit"]


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row from all others."""
    return *place(row), row["system"], row["codec"]


def save(found: dict[str, Any], saved: Path = SAVED, page: Path = PAGE) -> None:
    """Add to what was saved, and write the table between the marks of the page."""
    known = json.loads(saved.read_text())["rows"] if saved.exists() else []
    rows = {key_of(row): row for row in [*known, *found["rows"]]}
    everything = {"machine": found["machine"], "rows": list(rows.values())}
    saved.write_text(json.dumps(everything, indent=1) + "\n")
    told = f"{everything['machine']}.\n\n{tables(everything['rows'])}"
    put_between(page, MARKS, told)


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help=f"comma-separated (default all), of: {', '.join(CASES)}")
    add(
        "--seconds",
        type=float,
        default=MEASURE_S,
        metavar="S",
        help=f"of each measurement, at least (default: {MEASURE_S:g})",
    )
    add("--save", action="store_true", help=f"save the results in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the results as JSON on the last line")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(CASES)
    if unknown := set(options.only) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return options


def main() -> int:
    """Measure what is asked for; return 2 if this machine cannot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and peers are removed
    options = arguments()
    if why := lab_is_possible():
        print(f"bench rivals: {why}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {**circumstances(), "rows": []}
    origin = {"date": today(), "commit": commit()}
    for name in options.only:
        progress(name)
        for row in CASES[name](options.seconds):
            progress(json.dumps(asdict(row)))
            found["rows"].append(asdict(row) | origin)
            if options.save:  # what is finished stays, whatever comes next
                save(found)
    print(tables(found["rows"]))
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
