"""Compare methods at equal tokens: loss, gap to data parallel, and traffic.

    ./scripts/bench methods                the saved rows; measures if none are saved
    ./scripts/bench methods --rerun        measure again (hours on two cores)
    ./scripts/bench methods --workers 4 --tokens-per-param 4 --seeds 1      a shorter run
    ./scripts/bench methods --methods muloco --lr 3e-3      one method, with these settings
    ./scripts/bench methods --plot docs/benchmarks/methods.png
    ./scripts/bench methods --churn        workers that miss rounds, join late, or differ in speed

Each method runs with its own settings (`METHODS`) in the simulation of `atoll simulate`, with 1, 2,
4 and 8 workers. Rows with equal models, workers, batches and tokens are compared, over the seeds
that both have; their rates, windows and inner optimizers may differ. Rows are saved in
docs/benchmarks/methods.json, those of churn in churn.json next to it, and unfinished work in
build/bench_methods.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import methods_picture
import torch

from atoll.optim import methods
from atoll.peer.lab.simulate import Bench, Folder, Result, parse_methods, simulate
from atoll.peer.lab.simulation_report import rows
from atoll.peer.lab.simulation_settings import RATE_SHARES, Settings
from atoll.peer.training import models

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "methods.json"
CHURN_SAVED = SAVED.with_name("churn.json")
CACHE = ROOT / "build" / "bench_methods"


@dataclass(frozen=True)
class Case:
    """A method with the settings that were found for it."""

    spec: str
    windows: int = 1
    """H, as a multiple of --inner-steps."""
    inner: str = ""
    """Optimizer, instead of the method's own."""


METHODS = (
    Case("ddp"),
    Case("diloco"),
    Case("diloco(codec=int4)"),
    Case("diloco(codec=2bit, feedback=0)"),
    Case("streaming"),
    Case("eager"),
    Case("co2"),
    Case("muloco"),
    Case("muloco(codec=2bit)"),
    Case("muloco(codec=sign, feedback=0.5)", windows=4),
    Case("sparseloco"),
    Case("sparseloco", inner="muon"),
    Case("demo"),
    Case("dlion"),
    Case("noloco"),
)
OWN_SETTINGS = ("spec", "inner", "lr", "inner_steps")  # of a row; compared rows may differ in them
CHURN = {
    "undisturbed": {},
    "each misses 20% of the rounds": {"drop": 0.2},
    "speeds 1:2:4": {"speeds": (1.0, 2.0, 4.0)},
    "each its own text": {"split_data": True},
    "the last joins at a quarter": {"join_at": 0.25},
    "all of these": {"drop": 0.2, "speeds": (1.0, 2.0, 4.0), "split_data": True, "join_at": 0.25},
}
BYTES = 256  # vocabulary of the byte tokenizer


def settings(options: argparse.Namespace, workers: int) -> Settings:
    overrides = dict(item.split("=") for item in options.set)
    overrides = {name: int(value) for name, value in overrides.items()}
    model = models.build(
        options.model, overrides=overrides, vocab_size=BYTES, seq_len=options.seq_len, seed=0
    )
    params = sum(p.numel() for p in model.parameters())
    return Settings(
        workers=workers,
        tokens=options.tokens or options.tokens_per_param * params,
        inner_steps=options.inner_steps,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        model=options.model,
        overrides=overrides,
        lr=options.lr,
    )


def load(file: Path) -> list:
    return json.loads(file.read_text()) if file.exists() else []


def store(file: Path, all_rows: list) -> None:
    new = file.with_suffix(".tmp")
    new.write_text(json.dumps(all_rows, indent=1, sort_keys=True) + "\n")
    os.replace(new, file)


def group_of(row: dict) -> str:
    """Return a key that compared rows share: all settings but a method's own."""
    shared = asdict(Settings()) | row["settings"]
    shared = {key: value for key, value in shared.items() if key not in OWN_SETTINGS}
    return json.dumps(shared, sort_keys=True)


def key_of(row: dict) -> tuple:
    own = asdict(Settings()) | row["settings"]
    return group_of(row), *(own[key] for key in OWN_SETTINGS)


def cases(options: argparse.Namespace) -> Sequence[Case]:
    if not options.methods:
        return METHODS
    return [Case(spec, inner=options.inner) for spec in options.methods]


def trained(chosen: Settings, case: Case, options: argparse.Namespace) -> list[Result]:
    bench = Bench(chosen, options.device)
    folder = Folder(CACHE, chosen)
    (method,) = parse_methods(case.spec, chosen)
    return [
        simulate(bench, method, seed=seed, folder=folder, rerun=options.rerun, say=say)
        for seed in range(options.seeds)
    ]


def of_case(shared: Settings, case: Case) -> Settings:
    return replace(shared, inner_steps=shared.inner_steps * case.windows, inner=case.inner)


def measure(chosen: Settings, case: Case, options: argparse.Namespace) -> dict:
    """Return a row, with the loss of each seed, from 0 on."""
    results = trained(chosen, case, options)
    (row,) = rows(results, chosen)
    return vars(row) | {"losses": [result.valid_loss for result in results]}


def measure_churn(options: argparse.Namespace) -> list[dict]:
    """Measure each method under each kind of churn; save every row once it is complete."""
    for workers in options.workers if wanted(options, CHURN_SAVED) else ():
        for case, (name, changes) in product(cases(options), CHURN.items()):
            if "speeds" in changes and methods.parse(case.spec).every_step:
                continue  # has no window that could follow a speed
            say(f"{case.spec}, {name}, {workers} workers")
            churned = replace(of_case(settings(options, workers), case), **changes)
            row = measure(churned, case, options) | {"churn": name}
            del row["gap_to_ddp"]
            kept = [r for r in load(CHURN_SAVED) if key_of(r) != key_of(row)]
            store(CHURN_SAVED, [*kept, row])
    return load(CHURN_SAVED)


def show_churn(all_rows: list[dict]) -> None:
    base = {same_run(row): row for row in all_rows if row["churn"] == "undisturbed"}
    kinds = list(CHURN)
    for row in sorted(all_rows, key=lambda r: (same_run(r), kinds.index(r["churn"]))):
        undisturbed = base.get(same_run(row))
        change = "" if undisturbed is None else f"{100 * above(row, undisturbed):+.2f}%"
        spread = max(row["losses"]) - min(row["losses"])
        own = row["settings"]
        print(
            f"{own['params'] / 1e6:5.2f}M  {own['spec'][:30]:31}"
            f"{own['tokens'] / 1e6:4.1f}M tokens  H={own['inner_steps']:<4}{row['churn']:32}"
            f"{row['valid_loss']:8.4f}{change:>9}{spread:8.4f}  {row['seeds']} seeds"
        )


def same_run(row: dict) -> tuple[int, str, str]:
    """Return the settings that a run with churn shares with the undisturbed one."""
    changed = {name for changes in CHURN.values() for name in changes}
    shared = {key: value for key, value in row["settings"].items() if key not in changed}
    own = row["settings"]
    return own["params"], own["spec"], json.dumps(shared, sort_keys=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(all_rows: list[dict]) -> None:
    for group in grouped(all_rows):
        first = group[0]["settings"]
        print(
            f"\n{first['params'] / 1e6:.2g}M parameters, {first['workers']} workers of "
            f"{first['batch_size']} x {first['seq_len']}, {first['tokens'] / 1e6:.3g}M tokens"
        )
        print(
            f"{'':48}{'rate':>8}{'H':>5}{'seeds':>7}{'loss':>8}{'spread':>8}{'gap':>8}"
            f"{'bytes/token':>13}{'less':>9}"
        )
        for row in sorted(group, key=lambda row: row["valid_loss"]):
            print(line_of(row))


def line_of(row: dict) -> str:
    gap, less, own = row["gap_to_ddp"], row["traffic_ratio_vs_bf16_ddp"], row["settings"]
    return (
        f"{label(row)[:47]:48}{rate_of(own):8.2g}{own['inner_steps']:5}{row['seeds']:7}"
        f"{row['valid_loss']:8.4f}{max(row['losses']) - min(row['losses']):8.4f}"
        f"{'' if gap is None else f'{100 * gap:+.1f}%':>8}{row['bytes_per_token']:13.2f}"
        f"{'' if less is None else f'{less:,.0f}x':>9}"
    )


def rate_of(own: dict) -> float:
    """Return the peak rate of the inner optimizer."""
    method = methods.parse(own["spec"])
    inner = method.inner if method.every_step else own.get("inner") or method.inner
    return own["lr"] * RATE_SHARES[inner]


def label(row: dict) -> str:
    inner = row["settings"].get("inner")
    return row["settings"]["spec"] + (f" with {inner}" if inner else "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--methods",
        nargs="*",
        default=[],
        metavar="SPEC",
        help="methods to run, exactly as written",
    )
    parser.add_argument(
        "--workers",
        nargs="*",
        type=int,
        default=[1, 2, 4, 8],
        help="numbers of workers (default 1 2 4 8)",
    )
    parser.add_argument(
        "--tokens-per-param",
        type=int,
        default=15,
        help="training tokens per parameter (default %(default)s)",
    )
    parser.add_argument("--tokens", type=int, help="total tokens; overrides --tokens-per-param")
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds, from 0 on (default %(default)s)"
    )
    parser.add_argument(
        "--inner-steps",
        type=int,
        default=30,
        help="inner steps per window, H (default %(default)s)",
    )
    parser.add_argument("--model", default="nano", help="model preset (default %(default)s)")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="FIELD=N",
        help="integer fields of the preset to override",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        help="sequences per worker and step (default %(default)s)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=128, help="tokens per sequence (default %(default)s)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=1.5e-3,
        help="learning rate of AdamW; other inner optimizers scale it (default %(default)s)",
    )
    parser.add_argument(
        "--inner", default="", help="inner optimizer of --methods, instead of their own"
    )
    parser.add_argument("--churn", action="store_true", help="run the --methods with churn")
    parser.add_argument("--device", default="cpu", help="torch device (default %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default %(default)s)"
    )
    parser.add_argument("--rerun", action="store_true", help="measure again")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot the rows to a file")
    parser.add_argument(
        "--json", action="store_true", help="print the rows as JSON on the last line"
    )
    return parser.parse_args()


def wanted(options: argparse.Namespace, file: Path) -> bool:
    """Return whether to measure: no rows are saved, or the options ask for a size or method."""
    only_shown = 1 + options.json + options.churn + (2 if options.plot else 0)
    return options.rerun or not file.exists() or len(sys.argv) > only_shown


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.churn:
        all_rows = measure_churn(options)
        show_churn(all_rows)
    else:
        all_rows = measure_methods(options)
        show(all_rows)
        if options.plot:
            methods_picture.draw(grouped(all_rows), options.plot)
    if options.json:
        print(json.dumps(all_rows))


def measure_methods(options: argparse.Namespace) -> list[dict]:
    all_rows = load(SAVED)
    for workers in options.workers if wanted(options, SAVED) else ():
        for case in cases(options):
            row = measure(of_case(settings(options, workers), case), case, options)
            all_rows = with_gaps(taken_in(row, all_rows))
            store(SAVED, all_rows)
    return all_rows


def taken_in(row: dict, all_rows: list[dict]) -> list[dict]:
    """Add a row, replacing one with the same settings unless that one has more seeds."""
    kept = [old for old in all_rows if key_of(old) != key_of(row) or old["seeds"] > row["seeds"]]
    return kept if any(key_of(old) == key_of(row) for old in kept) else [*kept, row]


def grouped(all_rows: list[dict]) -> list[list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in all_rows:
        groups.setdefault(group_of(row), []).append(row)
    return list(groups.values())


def with_gaps(all_rows: list[dict]) -> list[dict]:
    """Give each row its gap to the data parallel run that it is compared with."""
    for group in grouped(all_rows):
        base = best(group, "ddp")
        for row in group if base else ():
            row["gap_to_ddp"] = above(row, base)
    return all_rows


def best(group: list[dict], method: str) -> dict | None:
    """Return a method's row with most seeds and, among these, the lowest loss."""
    of_method = [row for row in group if row["method"] == method]
    return min(of_method, key=lambda row: (-row["seeds"], row["valid_loss"]), default=None)


def above(row: dict, base: dict) -> float:
    """Return the relative loss of a row above another, over the seeds that both have."""
    pairs = list(zip(row["losses"], base["losses"], strict=False))
    return sum(mine for mine, _ in pairs) / sum(theirs for _, theirs in pairs) - 1


if __name__ == "__main__":
    main()
