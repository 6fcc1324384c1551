"""What low communication costs in loss: DiLoCo at several H against synchronous AdamW.

    ./scripts/bench outer                    the saved tables, and what is missing in them
    ./scripts/bench outer --rerun            measure again (hours on two cores)
    ./scripts/bench outer --table short      the length of the default demo only
    ./scripts/bench outer --trial lr=4e-3 inner_steps=15     one setting, not saved in the tables

Workers run in one process, in lockstep, with the classes of a real run: DiLoCo, the in-process
group with int8 on both legs and error feedback, the nano model, the standard library's source as
text. The baseline's batch is the workers' batches together, in as many steps. Finished rows are
kept in docs/benchmarks/outer.json and shown in outer.md beside it; unfinished ones resume from
build/bench_outer.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from atoll.optim.diloco import DiLoCo
from atoll.optim.inprocess import InProcessGroup
from atoll.peer import data, learner, models
from atoll.peer.devices import Device

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "bench_outer"
SAVED = ROOT / "docs" / "benchmarks" / "outer.json"
PAGE = ROOT / "docs" / "benchmarks" / "outer.md"
MARKS = ("<!-- rows of outer.json -->", "<!-- end of rows -->")
CPU = Device.choose("cpu")
SEQ_LEN = 128
CLIP_NORM = 1.0
VALID_BATCHES = 64  # of 16 sequences: 131,072 tokens, +-0.01 nats between halves
SAVE_EVERY = 100  # steps, then at the next end of a window: a minute or two


@dataclass(frozen=True, kw_only=True)
class Trial:
    method: str = "diloco"  # or adamw
    workers: int = 4
    steps: int = 300
    batch_size: int = 16  # sequences a worker and step
    lr: float = 1e-3
    warmup_steps: int = 50
    min_lr_ratio: float = 0.5
    inner_steps: int = 25
    outer_lr: float = 0.8
    outer_momentum: float = 0.3
    codec: str = "int8"
    seed: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = CLIP_NORM
    compile: bool = False

    @property
    def key(self) -> str:
        mine = asdict(self)
        del mine["compile"]
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
    def save_steps(self) -> int:
        windows = -(-SAVE_EVERY // self.inner_steps)
        return windows * self.inner_steps

    @property
    def tokens(self) -> int:
        return self.workers * self.batch_size * SEQ_LEN * self.steps


def short_table() -> list[Trial]:
    """The length and the settings of the default demo."""
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


class Bench:
    """Model, text and validation that all trials share."""

    def __init__(self, compiled: bool) -> None:
        self.corpus = data.open_corpus("stdlib", seq_len=SEQ_LEN)
        self.valid = self.corpus.validation(batches=VALID_BATCHES, batch_size=16, seq_len=SEQ_LEN)
        self.compiled = compiled
        self.loss = torch.compile(forward, dynamic=False) if compiled else forward

    def model(self, trial: Trial) -> torch.nn.Module:
        return models.build("nano", vocab_size=256, seq_len=SEQ_LEN, seed=trial.seed)

    def streams(self, trial: Trial) -> list[data.TokenStream]:
        return [
            self.corpus.stream(
                seed=trial.seed,
                peer_id=f"worker {index}",
                batch_size=trial.batch_size,
                seq_len=SEQ_LEN,
            )
            for index in range(trial.workers)
        ]

    def valid_loss(self, model: torch.nn.Module) -> float:
        with torch.no_grad():
            losses = [float(models.loss_of(model, b[:, :-1], b[:, 1:])) for b in self.valid]
        return sum(losses) / len(losses)

    def train_step(
        self, model: torch.nn.Module, batch: torch.Tensor, inner: torch.optim.Optimizer
    ) -> torch.Tensor:
        inner.zero_grad()
        loss = self.loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        return loss.detach()


def forward(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model(tokens, targets)


class AdamW:
    """The baseline: one model, one batch of all workers' sequences."""

    def __init__(self, bench: Bench, trial: Trial) -> None:
        self.bench = bench
        self.model = bench.model(trial)
        self.inners = [learner.adamw(self.model, trial, CPU)]
        self.streams = bench.streams(trial)

    def step(self) -> None:
        batch = torch.cat([stream.next_batch() for stream in self.streams])
        self.bench.train_step(self.model, batch, self.inners[0])
        self.inners[0].step()

    def wire_bytes(self) -> int:
        return 0

    def state_dict(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "inner": self.inners[0].state_dict(),
            "streams": [stream.state_dict() for stream in self.streams],
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.inners[0].load_state_dict(state["inner"])
        load_streams(self.streams, state)


class Workers:
    """DiLoCo: a model, an optimizer and a stream each."""

    def __init__(self, bench: Bench, trial: Trial) -> None:
        self.bench = bench
        self.group = InProcessGroup(
            trial.workers, lr=trial.outer_lr, momentum=trial.outer_momentum, codec=trial.codec
        )
        models_ = [bench.model(trial) for _ in range(trial.workers)]
        self.inners = [learner.adamw(model, trial, CPU) for model in models_]
        self.methods = [
            DiLoCo(model, inner, self.group.member(index), inner_steps=trial.inner_steps)
            for index, (model, inner) in enumerate(zip(models_, self.inners, strict=True))
        ]
        self.streams = bench.streams(trial)

    @property
    def model(self) -> torch.nn.Module:
        return self.methods[0].model

    def step(self) -> None:
        for method, stream in zip(self.methods, self.streams, strict=True):
            batch = stream.next_batch()
            loss = self.bench.train_step(method.model, batch, method.inner)
            method.step(tokens=batch[:, 1:].numel(), loss=loss)

    def wire_bytes(self) -> int:
        return self.group.statistics().body_bytes

    def state_dict(self) -> dict:
        return {
            "methods": [method.state_dict() for method in self.methods],
            "streams": [stream.state_dict() for stream in self.streams],
        }

    def load_state_dict(self, state: dict) -> None:
        for method, saved in zip(self.methods, state["methods"], strict=True):
            method.load_state_dict(saved)
        load_streams(self.streams, state)


def load_streams(streams: list, state: dict) -> None:
    for stream, saved in zip(streams, state["streams"], strict=True):
        stream.load_state_dict(saved)


def run(bench: Bench, trial: Trial, log) -> dict:
    side = (AdamW if trial.method == "adamw" else Workers)(bench, trial)
    file = CACHE / f"{trial.key}.pt"
    progress = {"step": 0, "seconds": 0.0, "curve": []}
    if file.exists():
        saved = torch.load(file, weights_only=True)
        side.load_state_dict(saved["side"])
        progress = saved["progress"]
        log(f"{trial.label}: goes on at step {progress['step']}")
    began, before = time.monotonic(), progress["seconds"]
    for step in range(progress["step"], trial.steps):
        rate = learner.learning_rate(step, inner=trial, total_steps=trial.steps)
        for inner in side.inners:
            for param_group in inner.param_groups:
                param_group["lr"] = rate
        side.step()
        progress["step"] = step + 1
        progress["seconds"] = before + time.monotonic() - began
        if (step + 1) % trial.save_steps == 0 or step + 1 == trial.steps:
            loss = bench.valid_loss(side.model)
            progress["curve"].append([step + 1, round(loss, 4)])
            log(f"{trial.label}: step {step + 1} of {trial.steps}, {loss:.4f}")
            CACHE.mkdir(parents=True, exist_ok=True)
            torch.save({"side": side.state_dict(), "progress": progress}, file)
    file.unlink(missing_ok=True)
    return result(trial, progress, side.wire_bytes(), bench.compiled)


def result(trial: Trial, progress: dict, body_bytes: int, compiled: bool) -> dict:
    return {
        "key": trial.key,
        "label": trial.label,
        "settings": asdict(trial),
        "tokens": trial.tokens,
        "valid_loss": progress["curve"][-1][1],
        "curve": progress["curve"],
        "update_bytes": body_bytes,
        "seconds": round(progress["seconds"]),
        "compiled": compiled,
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def commit() -> str:
    try:
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def store(file: Path, rows: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".tmp")
    new.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    os.replace(new, file)


def measure(bench: list, trial: Trial, file: Path, rerun: bool, options) -> dict:
    """A row from the file, or a new one into it; the bench is opened when first needed."""
    rows = load(file)
    if trial.key in rows and not rerun:
        return rows[trial.key]
    if not bench:
        bench.append(Bench(options.compile))
    row = run(bench[0], trial, lambda text: print(text, file=sys.stderr, flush=True))
    store(file, load(file) | {trial.key: row})
    return row


def with_gaps(rows: list[dict]) -> list[dict]:
    base = next((r for r in rows if r["settings"]["method"] == "adamw"), None)
    for row in rows:
        row["gap"] = None if base is None else row["valid_loss"] / base["valid_loss"] - 1
    return rows


def show(name: str, rows: list[dict]) -> None:
    first = rows[0]["settings"]
    print(f"\n{name}: {first['steps']} steps of {first['batch_size']} sequences a worker")
    print(f"{'':32}{'valid loss':>11}{'gap':>8}{'minutes':>9}")
    for row in rows:
        print(f"{row['label']:32}{row['valid_loss']:11.3f}{gap(row):>8}{row['seconds'] / 60:9.1f}")


def gap(row: dict) -> str:
    return "" if row["gap"] is None else f"{100 * row['gap']:+.1f}%"


def write_page(tables: dict[str, list[dict]]) -> None:
    """Put the tables between the marks of the page, whose text is written by hand."""
    text = PAGE.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    body = "".join(markdown(name, rows) for name, rows in tables.items() if rows)
    PAGE.write_text(text[:begin] + "\n" + body + text[end:])


def markdown(name: str, rows: list[dict]) -> str:
    first = rows[0]["settings"]
    lines = [
        f"\n**{name}**: {first['steps']} steps, {first['batch_size']} x {SEQ_LEN} tokens a worker "
        f"and step, lr {first['lr']}, warm-up {first['warmup_steps']} steps, "
        f"cosine to {first['min_lr_ratio']:g} of it\n",
        "| | tokens | valid loss | gap | update, MB a worker | date, commit |",
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
            raise SystemExit(f"expected one of {', '.join(kinds)}, got {name!r}")
        changes[name] = kinds[name](value)
    return Trial(**changes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--trial", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--rerun", action="store_true", help="measure again")
    parser.add_argument("--compile", action="store_true", help="torch.compile (needs a compiler)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the rows as JSON on the last line")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    bench: list = []
    tables: dict[str, list[dict]] = {}
    if options.trial is not None:
        trial = parsed(options.trial)
        row = measure(bench, trial, CACHE / "trials.json", options.rerun, options)
        tables["trial"] = [row]
    else:
        names = TABLES if options.table == "all" else [options.table]
        for name in names:
            tables[name] = []
            for trial in TABLES[name]():
                tables[name].append(measure(bench, trial, SAVED, options.rerun, options))
                write_page(saved_tables())
    for name, rows in tables.items():
        show(name, with_gaps(rows))
    if options.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
