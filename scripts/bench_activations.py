#!/usr/bin/env python3
"""Measure what a pipeline costs in loss: its outer rounds, and each codec of its activations.

    ./scripts/bench activations                     the saved rows; measures those that are missing
    ./scripts/bench activations --only outer,codecs
    ./scripts/bench activations --rerun             measure again (half an hour of one core)
    ./scripts/bench activations --json              the rows as JSON on the last line

    outer     pipelines of 4 stages with outer rounds against the model in one piece, equal tokens
    codecs    each codec between 4 stages of one peer each: loss, and bytes a token
    steps     steps to a fixed loss at a constant learning rate
    long      the same to the loss of four times as many steps, with one seed

Models of 0.25M and 0.93M parameters train in one process (`pipeline_losses.py`), on the Python
files of the standard library as bytes, with two seeds. Each row is saved once it is measured, in
docs/benchmarks/activations.json, and the tables in activations.md.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from circumstances import commit, today
from pipeline_losses import SIZES, STEP_TOKENS, Setting, Training
from rows import put_between

from atoll.compression.activations import parse_activations

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "activations.json"
PAGE = SAVED.with_suffix(".md")
MARKS = ("<!-- rows of activations.json -->", "<!-- end of rows -->")
SEEDS = (0, 1)
STEPS, LONG_STEPS, RATE = 320, 1280, 3e-3
MOST_TIMES = 4  # as many steps as bf16 takes to a fixed loss, before a row is given up
LOOK_STEPS, LOOK_BATCHES, LOOKS = 20, 4, 3  # the loss on the way is a mean of so many looks
WHOLE, CUT, DENSE = "unsplit", "4 stages", "bf16"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A line of a table."""

    table: str
    name: str
    setting: Setting

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return what tells a row from all others."""
        return self.table, self.name, self.setting.size, self.setting.seed


def one(size: str, **changes: Any) -> Setting:
    """Return a setting with the first seed."""
    return Setting(size=size, seed=SEEDS[0], steps=STEPS, lr=RATE, **changes)


OUTER = {
    WHOLE: {"stages": 1},
    "unsplit, 2 peers": {"stages": 1, "peers": 2},
    CUT: {},
    "4 stages, 2 peers each": {"peers": 2},
    "4 stages, 2 peers each, fixed paths": {"peers": 2, "mixes": False},
    "4 stages, 2 peers each, int8": {"peers": 2, "forward": "int8", "backward": "int8"},
}
CODECS = (
    ("fp32", "fp32"),
    (DENSE, DENSE),
    ("int8", "int8"),
    ("int4", "int8"),
    ("int4", "int4(rounding=random)"),
    ("int4", "int4"),
    ("subspace(k=32)", "subspace(k=32)"),
    ("subspace(k=20)", "subspace(k=20)"),
    ("subspace(k=14)", "subspace(k=14)"),
)
TO_LOSS = (CODECS[1], CODECS[4], CODECS[7])  # of CODECS; the first sets the loss


def cases() -> Iterator[Case]:
    """Return all cases in the order in which they are measured."""
    for seed, case in product(SEEDS, [*of_codecs(), *of_rounds()]):
        yield replace(case, setting=replace(case.setting, seed=seed))
    for codecs in (TO_LOSS[0], TO_LOSS[-1]):
        case = of_codec("long", *codecs)
        yield replace(case, setting=replace(case.setting, steps=LONG_STEPS, decays=False))


def of_codecs() -> Iterator[Case]:
    """Return the cases of codecs, with the first seed."""
    yield from (of_codec("codecs", *each) for each in CODECS)
    for case in (of_codec("steps", *each) for each in TO_LOSS):
        yield replace(case, setting=replace(case.setting, decays=False))


def of_codec(table: str, forward: str, backward: str) -> Case:
    """Return the case of a codec on the way out and one on the way back."""
    setting = one("0.93M", forward=forward, backward=backward)
    return Case(table=table, name=named(forward, backward), setting=setting)


def of_rounds() -> Iterator[Case]:
    """Return the cases of outer rounds, with the first seed, but one that is a case of codecs."""
    for size, (name, changes) in product(SIZES, OUTER.items()):
        if (size, name) != ("0.93M", CUT):
            yield Case(table="outer", name=name, setting=one(size, **changes))


def named(forward: str, backward: str) -> str:
    """Return the codecs of the way out and of the way back, in words."""
    return forward if forward == backward else f"{forward}, back {backward}"


def measure(case: Case, rows: Sequence[Row]) -> Row:
    """Train as a case says; return its row."""
    began_s = time.process_time()
    training = Training(case.setting)
    ends_at_loss = case.table in ("steps", "long")
    found = to_loss(case, training, rows) if ends_at_loss else to_end(case, training)
    return {
        "table": case.table,
        "name": case.name,
        "size": case.setting.size,
        "seed": case.setting.seed,
        "tokens": training.steps * STEP_TOKENS,
        **found,
        "bytes_per_token": token_bytes(case.setting),
        "cpu_s": round(time.process_time() - began_s, 1),
        "date": today(),
        "commit": commit(),
    }


def token_bytes(setting: Setting) -> list[int]:
    """Return the bytes of a token at one cut, out and back, without its id."""
    width = SIZES[setting.size].dim
    codecs = (parse_activations(each) for each in (setting.forward, setting.backward))
    return [codec.frame_bytes(1, width) for codec in codecs]


def to_end(case: Case, training: Training) -> Row:
    """Train for all steps; return the loss."""
    while training.steps < case.setting.steps:
        training.step()
    return {"steps": training.steps, "loss": training.held_out()}


def to_loss(case: Case, training: Training, rows: Sequence[Row]) -> Row:
    """Train until the loss is that of the first codec at its end; return the steps and the way."""
    target = None if case.name == named(*TO_LOSS[0]) else target_of(rows, case)
    until = case.setting.steps * (1 if target is None else MOST_TIMES)
    curve: list[tuple[int, float]] = []
    while training.steps < until:
        training.step()
        if training.steps % LOOK_STEPS:
            continue
        curve.append((training.steps, training.held_out(LOOK_BATCHES)))
        if target is not None and smooth(curve) <= target:
            break
    loss = smooth(curve)
    steps = training.steps if target is None or loss <= target else None
    return {"steps": steps, "loss": loss, "curve": curve}


def smooth(curve: Sequence[tuple[int, float]]) -> float:
    """Return the mean of the newest looks."""
    return statistics.mean(loss for _, loss in curve[-LOOKS:])


def target_of(rows: Sequence[Row], case: Case) -> float:
    """Return the loss that a case has to reach."""
    key = (case.table, named(*TO_LOSS[0]), case.setting.size, case.setting.seed)
    return next(float(row["loss"]) for row in rows if key_of(row) == key)


def key_of(row: Row) -> tuple[str, str, str, int]:
    """Return what tells a row from all others."""
    return row["table"], row["name"], row["size"], row["seed"]


def over_seeds(rows: Sequence[Row], table: str, name: str, size: str) -> dict[int, Row]:
    """Return the rows of a line, by seed."""
    return {row["seed"]: row for row in rows if key_of(row)[:3] == (table, name, size)}


def against(mine: dict[int, Row], base: dict[int, Row]) -> str:
    """Return how much the loss is above another, over the seeds that both have."""
    both = mine.keys() & base.keys()
    if not both:
        return ""
    ratio = sum(mine[seed]["loss"] for seed in both) / sum(base[seed]["loss"] for seed in both)
    return f"{100 * (ratio - 1):+.1f}%"


def losses(found: dict[int, Row]) -> str:
    """Return the loss of each seed as cells of a table."""
    return " | ".join(f"{found[seed]['loss']:.4f}" if seed in found else "" for seed in SEEDS)


def origin(found: dict[int, Row]) -> str:
    """Return when and at which commits rows were measured."""
    dates, commits = ({row[name] for row in found.values()} for name in ("date", "commit"))
    return ", ".join([*sorted(dates), *sorted(commits)])


def outer_table(rows: Sequence[Row]) -> str:
    """Return the losses with outer rounds as Markdown."""
    lines = [
        "| parameters | | seed 0 | seed 1 | against unsplit | against unsplit, 2 peers "
        "| date, commit |",
        "|---" * 7 + "|",
    ]
    for size in SIZES:
        lone, several = (over_seeds(rows, "outer", name, size) for name in list(OUTER)[:2])
        for name in OUTER:
            found = over_seeds(rows, "outer", name, size)
            if (size, name) == ("0.93M", CUT):
                found = over_seeds(rows, "codecs", "fp32", size)
            if found:
                lines.append(
                    f"| {size} | {name} | {losses(found)} | {against(found, lone)} "
                    f"| {against(found, several)} | {origin(found)} |"
                )
    return "\n".join(lines)


def codec_table(rows: Sequence[Row]) -> str:
    """Return the loss and the bytes of each codec as Markdown."""
    base = over_seeds(rows, "codecs", "fp32", "0.93M")
    lines = [
        "| codec | bytes a token, out + back | less than bf16 | seed 0 | seed 1 | against fp32 "
        "| date, commit |",
        "|---" * 7 + "|",
    ]
    dense = sum(token_bytes(one("0.93M", forward=DENSE, backward=DENSE)))
    for forward, backward in CODECS:
        found = over_seeds(rows, "codecs", named(forward, backward), "0.93M")
        if found:
            out, back = next(iter(found.values()))["bytes_per_token"]
            lines.append(
                f"| {named(forward, backward)} | {out} + {back} | {dense / (out + back):.1f}x "
                f"| {losses(found)} | {against(found, base)} | {origin(found)} |"
            )
    return "\n".join(lines)


def steps_table(rows: Sequence[Row]) -> str:
    """Return the steps to a fixed loss as Markdown."""
    lines = [
        "| codec | seed | loss to reach | steps | of those with bf16 | date, commit |",
        "|---" * 6 + "|",
    ]
    for table, seed in product(("steps", "long"), SEEDS):
        base = over_seeds(rows, table, named(*TO_LOSS[0]), "0.93M").get(seed)
        for name in (named(*each) for each in TO_LOSS):
            row = over_seeds(rows, table, name, "0.93M").get(seed)
            if row and base:
                lines.append(steps_line(row, base))
    return "\n".join(lines)


def steps_line(row: Row, base: Row) -> str:
    """Return the steps of one codec, beside those of the first, as a line of a table."""
    steps, most = row["steps"], MOST_TIMES * base["steps"]
    told = f"{steps:,}" if steps else f"not in {most:,} ({row['loss']:.4f})"
    ratio = f"{steps / base['steps']:.2f}" if steps else ""
    return (
        f"| {row['name']} | {row['seed']} | {base['loss']:.4f} | {told} | {ratio} "
        f"| {row['date']}, {row['commit']} |"
    )


WRITERS: dict[str, Callable[[Sequence[Row]], str]] = {
    "outer": outer_table,
    "codecs": codec_table,
    "steps": steps_table,
}
TABLES = [*WRITERS, "long"]  # which is written with the steps


def tables(rows: Sequence[Row]) -> str:
    """Return all rows as Markdown."""
    known = {row["table"] for row in rows}
    return "\n\n".join(write(rows) for name, write in WRITERS.items() if name in known)


def load(saved: Path = SAVED) -> list[Row]:
    """Return the saved rows."""
    rows: list[Row] = json.loads(saved.read_text()) if saved.exists() else []
    return rows


def save(rows: Sequence[Row], saved: Path = SAVED, page: Path = PAGE) -> None:
    """Write the rows, and the tables between the marks of the page."""
    lines = ",\n".join(" " + json.dumps(row) for row in rows)
    new = saved.with_suffix(".tmp")
    new.write_text(f"[\n{lines}\n]\n")
    new.replace(saved)
    put_between(page, MARKS, tables(rows))


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help=f"comma-separated (default all), of: {', '.join(TABLES)}")
    add("--rerun", action="store_true", help="measure again what is saved")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else TABLES
    if unknown := set(options.only) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}; choose from {', '.join(TABLES)}")
    return options


def main() -> None:
    """Measure what is missing, and print the tables."""
    options = arguments()
    torch.set_num_threads(1)  # the models are too small for more
    rows = load()
    wanted = [case for case in cases() if case.table in options.only]
    if options.rerun:
        again = {case.key for case in wanted}
        rows = [row for row in rows if key_of(row) not in again]
    known = {key_of(row) for row in rows}
    left = [case for case in wanted if case.key not in known]
    for number, case in enumerate(left, start=1):
        row = measure(case, rows)
        said = f"{case.table}: {case.name}, {case.setting.size}, seed {case.setting.seed}"
        print(
            f"[{number}/{len(left)}] {said}: {row['loss']:.4f} after {row['cpu_s']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        rows.append(row)
        save(rows)
    print(tables(rows))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
