"""Measure what `exact` and `--serve` cost a pipeline's throughput, for `bench_pipeline.py`.

`exact` is measured on hosts whose trainers mostly wait (`pipeline_lab.py`), first undisturbed, and
then with kills of peers of the middle stage, after which microbatches may count at two peers.

Serving computes, so it is measured with a model that computes too, and a peer for each of this
machine's cores. Clients ask for one text after the other. Their own work is in the same cores, at
the lowest priority.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_nat import ATOLL, events, progress, wait_until
from pipeline_lab import (
    ROWS,
    START_S,
    Flowing,
    Pipeline,
    busy_cores,
    counts,
    link_of,
    omissions,
    running,
    spans,
    total,
)

from atoll.coordinator.run.spec import RunSpec

TEXTS = Path(__file__).resolve().parent / "pipeline_texts.py"
RARE = 100_000  # steps of a window: no round while throughput is measured
SETTLE_S = 8.0
KILLS, KILL_EVERY_S, AWAY_S = 4, 25.0, 5.0
MIDDLE = "stage-2"  # of three
MODEL = {"dim": 256, "num_heads": 4, "ffn_dim": 688, "num_layers": 4}  # 3.2M parameters in blocks
SEQ_LEN, BATCH, CLIENTS, SHARE = 256, 2, 4, 0.2
SERVED = Pipeline(
    forward_s=(0.0,) * 2, factors=(1.0,) * 2, microbatches=8, staleness=2, inner_steps=RARE
)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A pipeline with or without exact counting."""

    exact: bool
    tokens_per_s: float
    """before the first kill"""
    kills: int
    counted: int
    """microbatches, at their origins, over the whole time"""
    double_counts: int
    resends: int
    omitted: int
    busy_cores: float
    """before the first kill"""

    @property
    def missed(self) -> list[str]:
        """The promise that this run breaks."""
        is_broken = self.exact and self.double_counts
        return [f"exact: {self.double_counts} counted twice"] if is_broken else []


@dataclass(frozen=True, kw_only=True)
class Served:
    """A pipeline whose peers serve texts."""

    share: float
    """of their time, at most"""
    clients: int
    before_tokens_per_s: float
    """trained while nobody asks for texts"""
    serving_tokens_per_s: float
    after_tokens_per_s: float
    text_tokens_per_s: float
    busy_cores: float
    """while texts are served"""


def exact(pipelines: Sequence[Pipeline], seconds: float) -> Iterator[Exact]:
    """Measure pipelines of three stages, and kill their middle peers.

    Args:
        pipelines: without exact counting, and with it.
        seconds: of the measurement before the first kill.
    """
    for pipeline in pipelines:
        with running(pipeline, link_of(25.0, 50.0)) as case:
            time.sleep(SETTLE_S)
            hosts = [
                int(each["name"].rpartition("-")[2])
                for each in case.newest()
                if each["module"] == MIDDLE
            ]
            began_s = time.time()
            busy = busy_cores(lambda: time.sleep(seconds))
            calm_s = time.time()
            for number in range(KILLS):
                strike(case, hosts[number % len(hosts)])
            times_s = (began_s, calm_s, time.time())
            yield exact_of(list(case.looks()), times_s, busy, exact=pipeline.exact)


def strike(case: Flowing, host: int) -> None:
    """Kill the peer of a host, start it again, and wait until the next one may be killed."""
    began = len(case.began_training_s(host))
    case.kill(host)
    struck_s = time.time()
    progress(f"killed peer-{host}")
    time.sleep(AWAY_S)
    case.start_peer(host)
    wait_until(lambda: len(case.began_training_s(host)) > began, START_S, case.words)
    time.sleep(max(SETTLE_S, struck_s + KILL_EVERY_S - time.time()))


def exact_of(
    looks: Sequence[dict[str, Any]],
    times_s: tuple[float, float, float],
    busy: float,
    *,
    exact: bool,
) -> Exact:
    """Return what the looks at a run show.

    Args:
        looks: all of them.
        times_s: from when to when it was calm, and until when peers were killed.
        busy: cores that were, while it was calm.
        exact: whether it counted so.
    """
    began_s, calm_s, until_s = times_s
    everyone = counts(looks)
    calm = [each for each in everyone if spans(each, began_s, calm_s)]
    found = [each for each in everyone if spans(each, began_s, until_s)]
    # All stages count the same microbatches, so the mean has the least noise of reports.
    rate = sum(each.rate(began_s, calm_s) for each in calm) / len({each.stage for each in calm})
    origins = [each for each in found if each.stage == 0]
    return Exact(
        exact=exact,
        tokens_per_s=ROWS * rate,
        kills=KILLS,
        counted=total(origins, "counted", began_s, until_s),
        double_counts=total(found, "double_counts", began_s, until_s),
        resends=total(found, "resends", began_s, until_s),
        omitted=sum(omissions(found, began_s, until_s).values()),
        busy_cores=busy,
    )


class Serving(Flowing):
    """A pipeline of a model of the built-in kind, whose peers serve texts."""

    def spec(self) -> RunSpec:
        """Return the run, which starts with all peers and has no end."""
        told = super().spec().model_dump(mode="json")
        own = {
            "model": {"overrides": MODEL},
            "data": {"source": "stdlib", "seq_len": SEQ_LEN},
            "inner": {"batch_size": BATCH, "grad_accumulation": SERVED.microbatches},
        }
        return RunSpec.from_dict(told | own)

    def start_peer(self, host: int) -> None:
        """Start the peer of a host."""
        self.run_peer(host, ["--serve", str(SHARE)], state_dir=f"peer-{host}")

    def join_clients(self) -> None:
        """Let clients join, at the coordinator's host, whose link is fast."""
        words = [ATOLL[0], str(TEXTS), str(self.invite), str(CLIENTS), str(self.asking)]
        with self.texts.open("a") as out:
            self.children["texts"] = self.lab.popen(
                0, words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        wait_until(
            lambda: any("joined" in each for each in events(self.texts)), START_S, self.words
        )

    @property
    def asking(self) -> Path:
        """The file that is there while clients ask for texts."""
        return self.folder / "asking"

    @property
    def texts(self) -> Path:
        """The file with a line for each token."""
        return self.folder / "texts.log"

    def tokens_s(self) -> list[float]:
        """Return when each token of a text came."""
        return [each["time"] for each in events(self.texts) if "token" in each]


def served(seconds: float) -> Served:
    """Measure a pipeline before, while and after clients ask for texts."""
    with running(SERVED, link_of(100.0, 5.0), kind=Serving, in_turn=True) as case:
        assert isinstance(case, Serving)
        case.join_clients()
        time.sleep(SETTLE_S)
        before, _ = trained(case, seconds)
        case.asking.touch()
        wait_until(lambda: len(case.tokens_s()) > CLIENTS, START_S, case.words)
        from_s = time.time()
        serving, busy = trained(case, seconds)
        tokens = sum(at_s >= from_s for at_s in case.tokens_s())
        took_s = time.time() - from_s
        case.asking.unlink()
        time.sleep(SETTLE_S)
        after, _ = trained(case, seconds)
    return Served(
        share=SHARE,
        clients=CLIENTS,
        before_tokens_per_s=before,
        serving_tokens_per_s=serving,
        after_tokens_per_s=after,
        text_tokens_per_s=tokens / took_s,
        busy_cores=busy,
    )


def trained(case: Flowing, seconds: float) -> tuple[float, float]:
    """Return the tokens/s that a run trains from now on, and how many cores are busy."""
    from_s = time.time()
    busy = busy_cores(lambda: time.sleep(seconds))
    until_s = time.time()
    found = [each for each in counts(list(case.looks())) if spans(each, from_s, until_s)]
    rate = sum(each.rate(from_s, until_s) for each in found) / case.pipeline.stages
    return BATCH * SEQ_LEN * rate, busy


def exact_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the runs with and without exact counting as Markdown."""
    lines = [
        "| exact | tokens/s | of the default | kills in stage 2 | counted | twice | resent "
        "| omitted | cores | date, commit |",
        "|---" * 10 + "|",
    ]
    usual = next((row["tokens_per_s"] for row in found if not row["exact"]), None)
    for row in found:
        ratio = f"{row['tokens_per_s'] / usual:.2f}" if usual else ""
        lines.append(
            f"| {str(row['exact']).lower()} | {row['tokens_per_s']:,.0f} | {ratio} "
            f"| {row['kills']} | {row['counted']} | {row['double_counts']} | {row['resends']} "
            f"| {row['omitted']} | {row['busy_cores']:.1f} | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)


def served_table(row: dict[str, Any]) -> str:
    """Return the run whose peers serve texts as Markdown."""
    without = statistics.mean((row["before_tokens_per_s"], row["after_tokens_per_s"]))
    return (
        "| serving | clients | trained, tokens/s: before | with texts | after | with : without "
        "| texts, tokens/s | cores | date, commit |\n"
        f"{'|---' * 9}|\n"
        f"| {row['share']:.0%} | {row['clients']} | {row['before_tokens_per_s']:,.0f} "
        f"| {row['serving_tokens_per_s']:,.0f} | {row['after_tokens_per_s']:,.0f} "
        f"| {row['serving_tokens_per_s'] / without:.2f} | {row['text_tokens_per_s']:.1f} "
        f"| {row['busy_cores']:.1f} | {row['date']}, {row['commit']} |"
    )
