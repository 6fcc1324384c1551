#!/usr/bin/env python3
"""Measure pipelines of real processes: their throughput against its bound, and under churn.

    ./scripts/bench pipeline                        everything; needs root
    ./scripts/bench pipeline --only links,unequal
    ./scripts/bench pipeline --only churn --minutes 10
    ./scripts/bench pipeline --save                 also write docs/benchmarks/pipeline.md and .json
    ./scripts/bench pipeline --json                 the results as JSON on the last line

    links     3 stages, 6 peers, at 10, 25 and 100 Mbit/s and 5 and 50 ms, in one run after another
    drained   the same at 25 Mbit/s and 50 ms, with steps that wait for all that is under way
    unequal   2 stages, 6 peers; those of the last stage are slow as 1:2:4
    churn     3 stages, 6 peers; one is killed each minute; it comes back, or a newcomer does
    vacant    3 stages, 6 peers; both peers of a stage are killed, of each in turn
    calm      3 stages, 6 peers train a small model on real text: held-out loss by tokens
    struck    the same with a kill every 40 s; the loss against that of `calm` at equal tokens
    exact     the run of `links` without and with `exact`, and kills in the second stage
    serve     2 stages, 2 peers that compute; training without and with clients of texts

A coordinator with a public address and the peers are processes on hosts of `WanLab`, with a model
whose slices mostly wait (`pipeline_lab.py`). Exits with 1 if a target is missed, and with 2 if
nothing can be measured.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_allreduce import lab_is_possible
from bench_nat import progress
from circumstances import circumstances, commit, today
from pipeline_costs import exact, exact_table, served, served_table
from pipeline_lab import (
    ROWS,
    Counts,
    Flowing,
    Pipeline,
    busy_cores,
    counts,
    link_of,
    most_chains,
    omissions,
    peer_bound,
    rounds,
    running,
    spans,
    stage_rate,
    total,
)
from pipeline_learning import compared, learned, learned_table
from pipeline_vacant import vacant, vacant_table
from rows import put_between

from atoll.coordinator.run.phases import AT_REST
from atoll.dht.testing.wan import WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "pipeline.json"
PAGE = ROOT / "docs" / "benchmarks" / "pipeline.md"
MARKS = ("<!-- rows of pipeline.json -->", "<!-- end of rows -->")
# docs/benchmarks/pipeline.md states what each of these is about.
RATIO, UNEQUAL, LIVING, LOSS = 0.85, 0.9, 0.9, 0.02
SETTLE_S, MEASURE_S = 8.0, 20.0
RELINK_S = 30.0  # until the peers have found that their links became faster
RARE = 100_000  # steps of a window: no round while throughput is measured
# From slow to fast, as peers are given up by how long returns usually take.
LINKS = [(mbit, rtt) for mbit in (10.0, 25.0, 100.0) for rtt in (50.0, 5.0)]
STRIKE_EVERY_S, AWAY_S = 60.0, 5.0
EQUAL = Pipeline(
    forward_s=(0.06,) * 3, factors=(1.0,) * 6, microbatches=32, staleness=2, inner_steps=RARE
)
DRAINED = replace(EQUAL, staleness=0)
EXACT = (EQUAL, replace(EQUAL, exact=True))
UNEQUAL_PEERS = Pipeline(
    forward_s=(0.02, 0.05),
    factors=(1.0, 1.0, 1.0, 2.0, 1.0, 4.0),
    microbatches=32,
    staleness=2,
    inner_steps=RARE,
)
CHURNED = replace(EQUAL, inner_steps=8, windows="deadline")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline in its steady state, measured."""

    case: str
    mbit: float
    rtt_ms: float
    microbatches: int
    """of a step"""
    staleness: int
    tokens_per_s: float
    bound_tokens_per_s: float
    ratio: float
    binds: str
    """what the bound is of"""
    rates: list[float]
    """microbatches a second of each peer, by stage and then by host"""
    waits: list[dict[str, float]]
    """fraction of the time that the trainers of each stage waited, by reason"""
    resends: int
    omitted: int
    double_counts: int
    link_use: float
    """of the busiest host's uplink, headers and repeated packets included"""
    dropped: float
    """fraction of the packets, at full queues of links"""
    busy_cores: float
    """of this machine"""

    @property
    def missed(self) -> list[str]:
        """The target that this row misses."""
        target = UNEQUAL if self.case == "unequal" else RATIO
        is_judged = self.case != "drained" and self.ratio < target
        return [f"{self.case}: {self.ratio:.2f} of the bound"] * is_judged


@dataclass(frozen=True, kw_only=True)
class Churn:
    """A pipeline whose peers are killed, measured."""

    minutes: float
    kills: int
    tokens_per_s: float
    living_tokens_per_s: float
    """bound of the slowest stage by the peers that trained at each moment, as a mean"""
    undisturbed: float
    """fraction of that bound before the first kill"""
    fraction: float
    """of that bound, over the whole time; divided by `undisturbed`, it says what kills cost"""
    in_rounds: float
    """fraction of the time that peers were in a round, or waited for one"""
    rounds: list[int]
    """of each stage"""
    chains: int
    """most different chains at one position of a stage"""
    omitted: dict[str, int]
    resends: int
    double_counts: int
    counted: int
    """microbatches, at their origins"""
    busy_cores: float

    @property
    def missed(self) -> list[str]:
        """The targets that this run misses."""
        return [
            *([f"churn: {self.fraction:.2f} of the living"] * (self.fraction < LIVING)),
            *([f"churn: {self.chains} different chains"] * (self.chains != 1)),
        ]


def measure(case: Flowing, name: str, link: WanLink, seconds: float) -> Row:
    """Measure a pipeline that runs, over the given time."""
    before, sent, dropped = time.time(), list(case.lab.sent), case.lab.dropped
    busy = busy_cores(lambda: time.sleep(seconds))
    after = time.time()
    used = [(now - then) for now, then in zip(case.lab.sent, sent, strict=True)]
    found = [each for each in counts(list(case.looks())) if spans(each, before, after)]
    pipeline = case.pipeline
    stages = [[each for each in found if each.stage == n] for n in range(pipeline.stages)]
    hosts = [sorted(int(each.name.rpartition("-")[2]) for each in stage) for stage in stages]
    bounds = [stage_rate(pipeline, n, link, hosts[n]) for n in range(pipeline.stages)]
    slowest = bounds.index(min(bounds))
    rates = [
        each.rate(before, after)
        for stage in stages
        for each in sorted(stage, key=lambda one: one.name)
    ]
    # All stages count the same microbatches, so the mean has the least noise of reports.
    rate = statistics.mean(sum(each.rate(before, after) for each in stage) for stage in stages)
    least = peer_bound(
        slowest,
        stages=pipeline.stages,
        forward_s=pipeline.forward_s[slowest],
        link=link,
        codecs=(pipeline.activations, pipeline.gradients),
    )
    return Row(
        case=name,
        mbit=link.up,
        rtt_ms=2 * link.delay_ms,
        microbatches=pipeline.microbatches,
        staleness=pipeline.staleness,
        tokens_per_s=ROWS * rate,
        bound_tokens_per_s=ROWS * min(bounds),
        ratio=rate / min(bounds),
        binds=f"{least.binds} of stage {slowest + 1}",
        rates=rates,
        waits=[waits(stage, before, after) for stage in stages],
        resends=total(found, "resends", before, after),
        omitted=sum(omissions(found, before, after).values()),
        double_counts=total(found, "double_counts", before, after),
        dropped=(case.lab.dropped - dropped) * case.lab.mtu / sum(used),
        link_use=max(used[1:]) * 8e-6 / (after - before) / link.up,
        busy_cores=busy,
    )


def waits(stage: Sequence[Counts], from_s: float, until_s: float) -> dict[str, float]:
    """Return the fraction of a window that trainers waited, by reason, as a mean over peers."""
    grown: defaultdict[str, float] = defaultdict(float)
    for each in stage:
        first, last, took_s = each.between(from_s, until_s)
        for reason, waited_s in last["waited_s"].items():
            grown[reason] += (waited_s - first["waited_s"].get(reason, 0.0)) / took_s / len(stage)
    return {reason: round(share, 3) for reason, share in grown.items() if share >= 0.005}


def over_links(seconds: float) -> Iterator[Row]:
    """Measure one run at all links, from slow to fast."""
    first = link_of(*LINKS[0])
    with running(EQUAL, first) as case:
        for mbit, rtt_ms in LINKS:
            link = link_of(mbit, rtt_ms)
            case.lab.links[:] = [WanLink(delay_ms=link.delay_ms)] + [link] * EQUAL.peers
            time.sleep(RELINK_S)
            yield measure(case, f"{mbit:g} Mbit/s, {rtt_ms:g} ms", link, seconds)


def drained(seconds: float) -> Iterator[Row]:
    """Measure steps without staleness."""
    link = link_of(25.0, 50.0)
    with running(DRAINED, link) as case:
        time.sleep(SETTLE_S)
        yield measure(case, "drained", link, seconds)


def unequal(seconds: float) -> Iterator[Row]:
    """Measure a last stage of unequal peers."""
    link = link_of(100.0, 5.0)
    with running(UNEQUAL_PEERS, link, in_turn=True) as case:
        time.sleep(2 * SETTLE_S)  # until each origin has measured each peer
        yield measure(case, "unequal", link, seconds)


def churn(minutes: float, seed: int = 1) -> Churn:
    """Kill a peer each minute; start it again, or every second time a newcomer in its place."""
    link, rng, kills = link_of(25.0, 50.0), random.Random(seed), list[tuple[int, float]]()
    with running(CHURNED, link) as case:
        time.sleep(SETTLE_S)
        began_s = time.time()
        until_s = began_s + 60 * minutes

        def strike() -> None:
            while (left_s := until_s - time.time()) > 0:
                time.sleep(min(STRIKE_EVERY_S, left_s))
                if until_s - time.time() < STRIKE_EVERY_S / 4:
                    time.sleep(max(0.0, until_s - time.time()))
                    break
                host = rng.randint(1, CHURNED.peers)
                kills.append((host, time.time()))
                case.kill(host)
                progress(f"killed peer-{host}")
                time.sleep(AWAY_S)
                case.start_peer(host, newcomer=0 if len(kills) % 2 else len(kills))

        busy = busy_cores(strike)
        looks = list(case.looks())
        trained = {host: case.began_training_s(host) for host in range(1, CHURNED.peers + 1)}
    return churn_of(looks, kills, trained, link, (began_s, until_s), busy)


def churn_of(
    looks: Sequence[dict[str, Any]],
    kills: Sequence[tuple[int, float]],
    trained: dict[int, list[float]],
    link: WanLink,
    window: tuple[float, float],
    busy: float,
) -> Churn:
    """Return what the looks at a run with kills show.

    Args:
        looks: all of them.
        kills: host and time of each.
        trained: times at which the processes of each host began to train.
        link: of all peers.
        window: from when to when.
        busy: cores that were.
    """
    from_s, until_s = window
    everyone = counts(looks)
    found = [each for each in everyone if spans(each, from_s, until_s)]
    spans_of = {host: spells(trained[host], [t for h, t in kills if h == host]) for host in trained}

    def stage_at(host: int, at_s: float) -> int | None:
        """Return the stage in which a host's peer trains; a newcomer may be given another one."""
        if not any(a <= at_s < b for a, b in spans_of[host]):
            return None
        of_host = [each for each in everyone if each.name == f"peer-{host}"]
        begun = [each for each in of_host if each.points[0][0] <= at_s]
        return (begun[-1] if begun else of_host[0]).stage if of_host else None

    def living(at_s: float) -> float:
        at = {host: stage_at(host, at_s) for host in spans_of}
        return min(
            stage_rate(CHURNED, n, link, [host for host, stage in at.items() if stage == n])
            for n in range(CHURNED.stages)
        )

    moments = [from_s + n for n in range(int(until_s - from_s))]
    could = statistics.mean(living(at_s) for at_s in moments)
    counted = sum(total([each], "counted", from_s, until_s) for each in found if each.stage == 0)
    first_s = min((at_s for _, at_s in kills), default=until_s)
    calm = [each for each in found if spans(each, from_s, first_s) and each.stage == 0]
    rate = counted / (until_s - from_s)
    return Churn(
        minutes=(until_s - from_s) / 60,
        kills=len(kills),
        tokens_per_s=ROWS * rate,
        living_tokens_per_s=ROWS * could,
        undisturbed=sum(each.rate(from_s, first_s) for each in calm) / living(from_s),
        fraction=rate / could,
        in_rounds=statistics.mean(
            peer["phase"] not in AT_REST
            for look in looks
            if from_s <= look["at"] <= until_s
            for peer in look["peers"]
            if peer["flow"] is not None
        ),
        rounds=rounds(looks),
        chains=most_chains(looks),
        omitted=omissions(found, from_s, until_s),
        resends=total(found, "resends", from_s, until_s),
        double_counts=total(found, "double_counts", from_s, until_s),
        counted=counted,
        busy_cores=busy,
    )


def spells(began_s: Sequence[float], killed_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return from when to when a host's peer trained."""
    ends = [*killed_s, float("inf")]
    return [(at_s, min(end_s for end_s in ends if end_s > at_s)) for at_s in began_s]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| case | step | tokens/s | bound | of it | binds | trainers wait, by stage | uplink "
        "| dropped | resent | omitted | twice | cores | date, commit |",
        "|---" * 14 + "|",
    ]
    for row in rows:
        step = f"{row['microbatches']}, staleness {row['staleness']}"
        lines.append(
            f"| {row['case']} | {step} | {row['tokens_per_s']:,.0f} "
            f"| {row['bound_tokens_per_s']:,.0f} | {row['ratio']:.2f} | {row['binds']} "
            f"| {'; '.join(map(told_waits, row['waits']))} | {row['link_use']:.0%} "
            f"| {row['dropped']:.1%} "
            f"| {row['resends']} | {row['omitted']} | {row['double_counts']} "
            f"| {row['busy_cores']:.1f} | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)


def told_waits(shares: dict[str, float]) -> str:
    """Return for what the trainers of a stage waited, in words."""
    return ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items()) or "nothing"


def churn_table(found: dict[str, Any]) -> str:
    """Return the run with kills as Markdown."""
    omitted = ", ".join(f"{reason} {n}" for reason, n in found["omitted"].items()) or "0"
    return (
        "| churn | kills | tokens/s | the living could | of it | before the first kill "
        "| of that | in rounds | rounds | chains | counted | omitted | resent | twice | cores "
        "| date, commit |\n"
        f"{'|---' * 16}|\n"
        f"| {found['minutes']:.1f} min | {found['kills']} | {found['tokens_per_s']:,.0f} "
        f"| {found['living_tokens_per_s']:,.0f} | {found['fraction']:.2f} "
        f"| {found['undisturbed']:.2f} | {found['fraction'] / found['undisturbed']:.2f} "
        f"| {found['in_rounds']:.0%} "
        f"| {', '.join(map(str, found['rounds']))} "
        f"| {found['chains']} | {found['counted']} | {omitted} | {found['resends']} "
        f"| {found['double_counts']} | {found['busy_cores']:.1f} "
        f"| {found['date']}, {found['commit']} |"
    )


def tables(found: dict[str, Any]) -> str:
    """Return all that was measured as Markdown."""
    parts = [table(found["rows"])] if found["rows"] else []
    parts += [churn_table(found["churn"])] if found["churn"] else []
    parts += [vacant_table(found["vacant"])] if found["vacant"] else []
    parts += [learned_table(found["learned"])] if len(found["learned"]) == len(LEARNING) else []
    parts += [exact_table(found["exact"])] if found["exact"] else []
    parts += [served_table(found["served"])] if found["served"] else []
    return "\n\n".join(parts)


def merged(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what was saved before with what is new; each result keeps its own date and commit."""
    by_case = {row["case"]: row for row in [*known.get("rows", ()), *found["rows"]]}
    return {
        "machine": found["machine"],
        "rows": list(by_case.values()),
        "churn": found["churn"] or known.get("churn"),
        "vacant": found["vacant"] or known.get("vacant", []),
        "learned": known.get("learned", {}) | found["learned"],
        "exact": found["exact"] or known.get("exact", []),
        "served": found["served"] or known.get("served"),
    }


def known(saved: Path = SAVED) -> dict[str, Any]:
    """Return what was saved before."""
    found: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {}
    return found


def missed_loss(found: dict[str, Any]) -> list[str]:
    """Return the target that a run with kills misses, once there is one without."""
    if len(found) < len(LEARNING):
        return []
    tokens, calm, struck = compared(found["calm"], found["struck"])
    cost = struck / calm - 1
    return [f"struck: {cost:+.1%} of the loss at {tokens:,.0f} tokens"] * (cost > LOSS)


def save(found: dict[str, Any], saved: Path = SAVED, page: Path = PAGE) -> None:
    """Add to what was saved, and write the tables between the marks of the page."""
    everything = merged(known(saved), found)
    saved.write_text(json.dumps(everything, indent=1) + "\n")
    told = f"{everything['machine']}.\n\n{tables(everything)}"
    put_between(page, MARKS, told)


CASES = {"links": over_links, "drained": drained, "unequal": unequal}
LEARNING = ("calm", "struck")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [*CASES, "churn", "vacant", *LEARNING, "exact", "serve"]
    add("--only", default="", help=f"comma-separated (default all), of: {', '.join(names)}")
    add(
        "--minutes",
        type=float,
        default=4.0,
        metavar="MIN",
        help="of churn, calm and struck (default: 4)",
    )
    add(
        "--seconds",
        type=float,
        default=MEASURE_S,
        metavar="S",
        help=f"of each measurement (default: {MEASURE_S:g})",
    )
    add("--save", action="store_true", help=f"save the results in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the results as JSON on the last line")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else names
    if unknown := set(options.only) - set(names):
        parser.error(f"no case {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    return options


def main() -> int:
    """Measure what is asked for; return 1 if a target is missed, 2 if this machine cannot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and peers are removed
    options = arguments()
    if why := lab_is_possible():
        print(f"bench pipeline: {why}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {
        **circumstances(),
        "rows": [],
        "churn": None,
        "vacant": [],
        "learned": {},
        "exact": [],
        "served": None,
    }
    missed: list[str] = []
    origin = {"date": today(), "commit": commit()}
    for name in options.only:
        progress(name)
        for row in CASES[name](options.seconds) if name in CASES else ():
            progress(json.dumps(asdict(row)))
            found["rows"].append(asdict(row) | origin)
            missed += row.missed
        if name == "churn":
            killed = churn(options.minutes)
            progress(json.dumps(asdict(killed)))
            found["churn"] = asdict(killed) | origin
            missed += killed.missed
        for one in vacant() if name == "vacant" else ():
            progress(json.dumps(asdict(one)))
            found["vacant"].append(asdict(one) | origin)
        if name in LEARNING:
            learns = learned(options.minutes, is_struck=name == "struck")
            progress(json.dumps(asdict(learns)))
            found["learned"][name] = asdict(learns) | origin
            missed += missed_loss(merged(known(), found)["learned"])
        for each in exact(EXACT, options.seconds) if name == "exact" else ():
            progress(json.dumps(asdict(each)))
            found["exact"].append(asdict(each) | origin)
            missed += each.missed
        if name == "serve":
            texts = served(options.seconds)
            progress(json.dumps(asdict(texts)))
            found["served"] = asdict(texts) | origin
        if options.save:  # what is finished stays, whatever comes next
            save(found)
    print(tables(found))
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    if options.json:
        print(json.dumps(found))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
