"""What kills cost a pipeline in loss, with a small model and real text, for `bench_pipeline.py`.

A run without an end keeps a checkpoint of all stages for each round of the last one. The model's
loss is that of `atoll eval`, and its tokens are those that the logs of its stages have counted
until there, as a mean over the stages. Two runs are compared at equal tokens, by straight lines
between checkpoints.
"""

import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch
from bench_nat import progress
from pipeline_lab import (
    Flowing,
    Pipeline,
    counts,
    link_of,
    most_chains,
    omissions,
    rounds,
    running,
    spans,
    state_dir,
    total,
)
from torch import nn

from atoll.coordinator.checkpoint_sets import CheckpointSet, find
from atoll.coordinator.checkpoints import after_rounds
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LOG_FILE
from atoll.peer.training.bits import held_out, measure
from atoll.peer.training.devices import Device
from atoll.peer.training.trained import load_checkpoint

T = TypeVar("T")

MODEL = {"dim": 64, "num_heads": 2, "ffn_dim": 200, "num_layers": 4}  # 0.25M parameters
SEQ_LEN, BATCH, MICROBATCHES, INNER_STEPS = 128, 2, 8, 8
LEARNED = Pipeline(
    forward_s=(0.0,) * 3,
    factors=(1.0,) * 6,
    microbatches=MICROBATCHES,
    staleness=2,
    inner_steps=INNER_STEPS,
    windows="deadline",
)
KILL_EVERY_S, AWAY_S = 40.0, 5.0
EVAL_TOKENS = 65_536
MOST_POINTS = 16
LEAST_ROUNDS = 3  # the loss of the first ones says little


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A pipeline that learned for some time."""

    minutes: float
    kills: int
    points: list[tuple[float, float]]
    """tokens and held-out loss of the stages' checkpoints at some moments"""
    rounds: list[int]
    """of each stage"""
    chains: int
    """most different chains at one position of a stage"""
    counted: int
    """microbatches, at their origins"""
    omitted: dict[str, int]
    resends: int
    double_counts: int


class Learning(Flowing):
    """A pipeline of a small model of the built-in kind, with real text."""

    def spec(self) -> RunSpec:
        """Return the run, which starts with all peers, has no end and keeps all checkpoints."""
        told = super().spec().model_dump(mode="json")
        own = {
            "model": {"overrides": MODEL},
            "data": {"source": "stdlib", "seq_len": SEQ_LEN},
            "inner": {"batch_size": BATCH, "grad_accumulation": MICROBATCHES},
            "coordinator": told["coordinator"] | {"checkpoint_every": 1, "keep_checkpoints": 0},
        }
        return RunSpec.from_dict(told | own)

    def start_peer(self, host: int, *, newcomer: int = 0) -> None:
        """Start the peer of a host, or a newcomer, without the waits of a model's place."""
        self.run_peer(host, [], state_dir=state_dir(host, newcomer))


def learned(minutes: float, *, is_struck: bool, seed: int = 1) -> Learned:
    """Let a pipeline learn, and maybe kill a peer now and then.

    Of those that are killed, every second one comes back, and the others are replaced by newcomers.
    """
    rng, kills = random.Random(seed), list[float]()
    with running(LEARNED, link_of(25.0, 50.0), kind=Learning) as case:
        assert isinstance(case, Learning)
        began_s = time.time()
        until_s = began_s + 60 * minutes

        def strike() -> None:
            for number in count():
                time.sleep(max(0.0, min(KILL_EVERY_S, until_s - time.time())))
                if not is_struck or until_s - time.time() < KILL_EVERY_S / 2:
                    break
                host = rng.randint(1, LEARNED.peers)
                case.kill(host)
                kills.append(time.time())
                progress(f"killed peer-{host}")
                time.sleep(AWAY_S)
                case.start_peer(host, newcomer=number if number % 2 else 0)
            time.sleep(max(0.0, until_s - time.time()))

        strike()
        looks = list(case.looks())
        case.stop()
        points = curve(case.folder)
    return learned_of(looks, points, len(kills), (began_s, until_s))


def learned_of(
    looks: Sequence[dict[str, Any]],
    points: list[tuple[float, float]],
    kills: int,
    window: tuple[float, float],
) -> Learned:
    """Return what the looks at a run show, beside its kills and its curve."""
    began_s, until_s = window
    found = [each for each in counts(looks) if spans(each, began_s, until_s)]
    origins = [each for each in found if each.stage == 0]
    return Learned(
        minutes=(until_s - began_s) / 60,
        kills=kills,
        points=points,
        rounds=rounds(looks),
        chains=most_chains(looks),
        counted=total(origins, "counted", began_s, until_s),
        omitted=omissions(found, began_s, until_s),
        resends=total(found, "resends", began_s, until_s),
        double_counts=total(found, "double_counts", began_s, until_s),
    )


def curve(folder: Path) -> list[tuple[float, float]]:
    """Return tokens and held-out loss at some moments of a run."""
    state = folder / "state"
    counted = [tokens_until(state / f"stage-{n + 1}" / LOG_FILE) for n in range(LEARNED.stages)]
    last_stage = state / "checkpoints" / f"stage-{LEARNED.stages}"
    found = spread(sorted(last_stage.glob("*.safetensors"))[LEAST_ROUNDS:])
    if not found:
        return []
    trained = load_checkpoint(state / "checkpoints")
    text = held_out(trained, data=None, tokenizer=None, tokens=EVAL_TOKENS)
    device, points = Device.choose("cpu", "float32"), []
    for moment in map(find, found):
        put_params(trained.model, moment)
        loss = measure(trained.model, trained.tokenizer, text.batches, device=device).loss
        at = moment.positions
        tokens = mean(of_stage[position] for of_stage, position in zip(counted, at, strict=True))
        points.append((tokens, loss))
        progress(f"{after_rounds(at)}: {tokens:,.0f} tokens, loss {loss:.4f}")
    return points


def put_params(model: nn.Module, moment: CheckpointSet) -> None:
    """Give a model the parameters of the stages' checkpoints."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in moment.params():
            params.pop(name).copy_(value)
    if params:
        raise RuntimeError(f"expected a value of each parameter, got none of {sorted(params)}")


def spread(of: Sequence[T]) -> list[T]:
    """Return up to `MOST_POINTS` of some items, evenly spaced from the last one back."""
    every = -(-len(of) // MOST_POINTS) or 1
    return list(of[::-1][::every])[::-1]


def tokens_until(log: Path) -> list[int]:
    """Return the tokens that a log's entries have counted before each position."""
    with closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT entry FROM entries ORDER BY position").fetchall()
    entries = (Entry.decode(row[0]) for row in rows)
    return [0, *accumulate(sum(m.tokens for m in entry.members) for entry in entries)]


def loss_at(points: Sequence[tuple[float, float]], tokens: float) -> float:
    """Return the loss after so many tokens, within the range of some checkpoints."""
    for (before, first), (after, second) in pairwise(points):
        if before <= tokens <= after:
            return first + (second - first) * (tokens - before) / (after - before)
    raise ValueError(f"expected {points[0][0]:,.0f} to {points[-1][0]:,.0f} tokens, got {tokens:,}")


def compared(calm: dict[str, Any], struck: dict[str, Any]) -> tuple[float, float, float]:
    """Return the tokens up to which both runs came, and the loss of each there."""
    tokens = min(calm["points"][-1][0], struck["points"][-1][0])
    return tokens, loss_at(calm["points"], tokens), loss_at(struck["points"], tokens)


def learned_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the runs as Markdown: undisturbed, and with kills, if both were measured."""
    calm, struck = found["calm"], found["struck"]
    tokens, *losses = compared(calm, struck)
    lines = [
        f"| held-out loss at {tokens:,.0f} tokens | kills | loss | against undisturbed | rounds "
        "| chains | counted | omitted | resent | twice | date, commit |",
        "|---" * 11 + "|",
    ]
    for name, row, loss in zip(("undisturbed", "with kills"), (calm, struck), losses, strict=True):
        omitted = ", ".join(f"{reason} {n}" for reason, n in row["omitted"].items()) or "0"
        lines.append(
            f"| {name}, {row['minutes']:.1f} min | {row['kills']} | {loss:.4f} "
            f"| {loss / losses[0] - 1:+.1%} | {', '.join(map(str, row['rounds']))} "
            f"| {row['chains']} | {row['counted']} | {omitted} | {row['resends']} "
            f"| {row['double_counts']} | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)
