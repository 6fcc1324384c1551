"""Measure the loss of infrequent communication: DiLoCo at several H, and synchronous AdamW.

    ./scripts/bench outer                    the saved tables; measures missing rows
    ./scripts/bench outer --rerun            measure again (hours on two cores)
    ./scripts/bench outer --table short      only the length of the default demo
    ./scripts/bench outer --trial lr=4e-3 inner_steps=15     one setting, not saved in the tables

Workers run in the simulation of `atoll simulate`: DiLoCo with int8 on both legs and error feedback,
the nano model, and the standard library's source as text. The baseline takes the mean gradient of
all workers at every step, which is one model with all batches together. Finished rows are saved in
docs/benchmarks/outer.json and shown in outer.md next to it; unfinished ones resume from
build/bench_outer.
"""

import argparse
import hashlib
import json
import os
import sys
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from circumstances import commit, today

from atoll.peer.lab.simulate import Bench, Folder, Result, parse_methods, simulate
from atoll.peer.lab.simulation_settings import Settings

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "bench_outer"
SAVED = ROOT / "docs" / "benchmarks" / "outer.json"
PAGE = ROOT / "docs" / "benchmarks" / "outer.md"
MARKS = ("<!-- rows of outer.json -->", "<!-- end of rows -->")
SEQ_LEN = 128
VALID_BATCHES = 64  # of 16 sequences: 131,072 tokens, +-0.01 nats between halves
POINT_EVERY = 100  # steps; measured at the next end of a window
FIXED = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 1.0}
"""Constants of the simulation. They are part of a row's key, because they were once options."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    method: str = "diloco"  # or adamw
    workers: int = 4
    steps: int = 300
    batch_size: int = 16  # sequences per worker and step
    lr: float = 1e-3
    warmup_steps: int = 50
    min_lr_ratio: float = 0.5
    inner_steps: int = 25
    outer_lr: float = 0.8
    outer_momentum: float = 0.3
    codec: str = "int8"
    seed: int = 0

    @property
    def key(self) -> str:
        mine = asdict(self) | FIXED
        if self.method == "adamw":
            for name in ("inner_steps", "outer_lr", "outer_momentum", "codec"):
                del mine[name]
        return hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        if self.method == "adamw":
            return "AdamW, all batches together" if self.workers > 1 else "one peer alone"
        return f"H={self.inner_steps}, outer {self.outer_lr}/{self.outer_momentum}"

    @property
    def spec(self) -> str:
        if self.method == "adamw":
            return f"ddp(codec=fp32, clip_norm={FIXED['clip_norm']})"
        return f"diloco(lr={self.outer_lr}, momentum={self.outer_momentum}, codec={self.codec})"

    @property
    def simulation(self) -> Settings:
        windows = -(-POINT_EVERY // self.inner_steps)
        return Settings(
            workers=self.workers,
            tokens=self.tokens,
            inner_steps=self.inner_steps,
            batch_size=self.batch_size,
            seq_len=SEQ_LEN,
            lr=self.lr,
            warmup=self.warmup_steps / self.steps,
            min_lr_ratio=self.min_lr_ratio,
            clip_norm=FIXED["clip_norm"],
            points=max(1, self.steps // (windows * self.inner_steps)),
            valid_batches=VALID_BATCHES,
        )

    @property
    def tokens(self) -> int:
        return self.workers * self.batch_size * SEQ_LEN * self.steps


def short_table() -> list[Trial]:
    """Return the trials with the length and settings of the default demo."""
    base = Trial()
    return [
        replace(base, method="adamw"),
        replace(base, method="adamw", workers=1),
        base,
    ]


def long_table() -> list[Trial]:
    base = Trial(steps=1600, lr=1.5e-3, warmup_steps=100, min_lr_ratio=0.1)
    return [replace(base, method="adamw")] + [
        replace(base, inner_steps=inner_steps) for inner_steps in (10, 25, 50, 100)
    ]


TABLES = {"short": short_table, "long": long_table}


def run(trial: Trial, rerun: bool) -> dict:
    settings = trial.simulation
    (method,) = parse_methods(trial.spec, settings)
    result = simulate(
        Bench(settings),
        method,
        seed=trial.seed,
        folder=Folder(CACHE, settings),
        rerun=rerun,
        say=lambda text: print(f"{trial.label}: {text}", file=sys.stderr, flush=True),
    )
    return row_of(trial, result)


def row_of(trial: Trial, result: Result) -> dict:
    curve = [[point.step, round(point.valid_loss, 4)] for point in result.points]
    return {
        "key": trial.key,
        "label": trial.label,
        "settings": asdict(trial) | FIXED,
        "tokens": trial.tokens,
        "valid_loss": curve[-1][1],
        "curve": curve,
        "update_bytes": 0 if trial.method == "adamw" else result.update_bytes,
        "seconds": round(result.seconds),
        "torch": torch.__version__,
        "commit": commit(),
        "date": today(),
    }


def load(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def store(file: Path, rows: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".tmp")
    new.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    os.replace(new, file)


def measure(trial: Trial, file: Path, rerun: bool) -> dict:
    """Return a row from the file; measure and store it if it is missing."""
    rows = load(file)
    if trial.key in rows and not rerun:
        return rows[trial.key]
    row = run(trial, rerun)
    store(file, load(file) | {trial.key: row})
    return row


def with_gaps(rows: list[dict]) -> list[dict]:
    base = next((r for r in rows if r["settings"]["method"] == "adamw"), None)
    for row in rows:
        row["gap"] = None if base is None else row["valid_loss"] / base["valid_loss"] - 1
    return rows


def show(name: str, rows: list[dict]) -> None:
    first = rows[0]["settings"]
    print(f"\n{name}: {first['steps']} steps of {first['batch_size']} sequences per worker")
    print(f"{'':32}{'valid loss':>11}{'gap':>8}{'minutes':>9}")
    for row in rows:
        print(f"{row['label']:32}{row['valid_loss']:11.3f}{gap(row):>8}{row['seconds'] / 60:9.1f}")


def gap(row: dict) -> str:
    return "" if row["gap"] is None else f"{100 * row['gap']:+.1f}%"


def write_page(tables: dict[str, list[dict]]) -> None:
    """Write the tables between the marks of the page; the other text is written by hand."""
    text = PAGE.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    body = "".join(markdown(name, rows) for name, rows in tables.items() if rows)
    PAGE.write_text(text[:begin] + "\n" + body + text[end:])


def markdown(name: str, rows: list[dict]) -> str:
    first = rows[0]["settings"]
    caption = (
        f"**{name}**: {first['steps']} steps, {first['batch_size']} x {SEQ_LEN} tokens per "
        f"worker and step, lr {first['lr']}, warm-up {first['warmup_steps']} steps, "
        f"cosine to {first['min_lr_ratio']:g} of it"
    )
    lines = [
        f"\n{textwrap.fill(caption, 88)}\n",
        "| | tokens | valid loss | gap | update, MB per worker | date, commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent = f"{row['update_bytes'] / 1e6:.1f}" if row["update_bytes"] else ""
        lines.append(
            f"| {row['label']} | {row['tokens'] / 1e6:.1f}M | {row['valid_loss']:.3f} | {gap(row)} "
            f"| {sent} | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines) + "\n"


def saved_tables() -> dict[str, list[dict]]:
    rows = load(SAVED)
    return {
        name: with_gaps([rows[trial.key] for trial in table() if trial.key in rows])
        for name, table in TABLES.items()
    }


def parsed(assignments: list[str]) -> Trial:
    kinds = {field.name: field.type for field in fields(Trial)}
    changes = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in kinds:
            raise SystemExit(f"unknown setting {name!r}; choose from {', '.join(kinds)}")
        changes[name] = kinds[name](value)
    return Trial(**changes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table",
        choices=[*TABLES, "all"],
        default="all",
        help="table to show or measure (default %(default)s)",
    )
    parser.add_argument(
        "--trial",
        nargs="*",
        metavar="NAME=VALUE",
        help="measure one setting that differs from the defaults as given",
    )
    parser.add_argument("--rerun", action="store_true", help="measure again")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the rows as JSON on the last line"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    tables: dict[str, list[dict]] = {}
    if options.trial is not None:
        trial = parsed(options.trial)
        tables["trial"] = [measure(trial, CACHE / "trials.json", options.rerun)]
    else:
        names = TABLES if options.table == "all" else [options.table]
        for name in names:
            tables[name] = []
            for trial in TABLES[name]():
                tables[name].append(measure(trial, SAVED, options.rerun))
                write_page(saved_tables())
    for name, rows in tables.items():
        show(name, with_gaps(rows))
    if options.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
