#!/usr/bin/env python3
"""Measure the damage of Byzantine peers, by reduction rule and with or without norm clipping.

    ./scripts/bench robust                    the saved table; measures missing rows
    ./scripts/bench robust --rerun --save     measure again (15 minutes of one core) and save
    ./scripts/bench robust --attacks sign-flip --liars 1 --reducers mean,median
    ./scripts/bench robust --json             the rows as JSON on the last line

Eight DiLoCo workers train a small transformer on the standard library's source in one process
(`atoll.peer.lab.simulate`), with the codec, error feedback, weights, clip factors and outer step of
a real run. Owners reduce cell by cell, as in a run (`atoll.peer.rounds.allreduce.reduction`). The
last workers lie: they train like the others, but submit something else.

    sign-flip   their own pseudo-gradient times -10
    gaussian    noise, a hundred times as long as the mean of the honest workers
    alie        the mean of the honest workers minus 1.5 standard deviations of each coordinate, the
                same from all liars (arXiv:1902.06156; its z for one or two of eight would be 0 or
                less, 1.5 is what its experiments use)
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from circumstances import commit, today
from rows import put_between
from torch import Tensor

from atoll.optim import methods, outer_defaults
from atoll.optim.inprocess.rounds import SHAPES, GroupError, MeanReduction, Reduced
from atoll.optim.methods import DiLoCoMethod
from atoll.optim.methods.base import register
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.contribution import CLIP_AT
from atoll.optim.reduction.robust import REDUCERS, ReducerName, rule_of
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.optim.state.pieces import decode_pieces
from atoll.peer.lab.simulate import Bench, Folder, Settings, simulate

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "bench_robust"
SAVED = ROOT / "docs" / "benchmarks" / "robust.json"
PAGE = ROOT / "docs" / "benchmarks" / "robust.md"
MARKS = ("<!-- rows of robust.json -->", "<!-- end of rows -->")
WORKERS = 8
INNER_STEPS = 25
SIGN_FLIP = -10.0
NOISE = 100.0  # times the norm of the honest mean; ten times does no harm
ALIE_Z = 1.5
BLOW_UP = math.log(256)  # nats per byte of a uniform guess; above it a run is lost


def sign_flip(own_N: Tensor, honest_MN: Tensor, seed: int) -> Tensor:
    return SIGN_FLIP * own_N


def gaussian(own_N: Tensor, honest_MN: Tensor, seed: int) -> Tensor:
    noise_N = torch.randn(own_N.shape, generator=torch.Generator().manual_seed(seed))
    return noise_N * (NOISE * honest_MN.mean(dim=0).norm() / noise_N.norm())


def alie(own_N: Tensor, honest_MN: Tensor, seed: int) -> Tensor:
    return honest_MN.mean(dim=0) - ALIE_Z * honest_MN.std(dim=0)


Attack = Callable[[Tensor, Tensor, int], Tensor]
"""(a liar's own pseudo-gradient, those of the honest workers, seed) -> what the liar submits"""

ATTACKS: dict[str, Attack] = {"sign-flip": sign_flip, "gaussian": gaussian, "alie": alie}


@register
@dataclass(frozen=True, kw_only=True)
class LyingMethod(DiLoCoMethod):
    """DiLoCo whose last workers lie, reduced by a rule."""

    name: ClassVar[str] = "diloco-with-liars"

    reducer: ReducerName = "mean"
    attack: str = "none"
    liars: int = 0

    @property
    def reduction(self) -> str:
        return "mean-with-liars"


class LyingReduction(MeanReduction):
    """The dense shape, with liars among the senders and a robust rule at the owners."""

    def reduce(
        self, contributions: Sequence[Contribution], weights: Sequence[float], state: OuterState
    ) -> Reduced:
        self._weights, self._rounds = weights, getattr(self, "_rounds", 0) + 1
        return super().reduce(self._lied(contributions), weights, state)

    def _lied(self, contributions: Sequence[Contribution]) -> list[Contribution]:
        honest = len(contributions) - self.method.liars
        if honest == len(contributions):
            return list(contributions)
        attack = ATTACKS[self.method.attack]
        honest_MN = torch.stack([c.delta_N for c in contributions[:honest]])
        liars = [
            replace(c, delta=attack(c.delta_N, honest_MN, WORKERS * self._rounds + i))
            for i, c in enumerate(contributions[honest:])
        ]
        return [*contributions[:honest], *liars]

    def _mean(self, offers, shares, total_weight):
        rule = rule_of(self.method.reducer)
        if rule is None:
            return super()._mean(offers, shares, total_weight)
        rows_MF = torch.stack(
            [
                decode_pieces(self.method.codec, offer.frames, self.fragment.pieces)
                * (share / weight)
                for offer, share, weight in zip(offers, shares, self._weights, strict=True)
            ]
        )
        return torch.cat([rule(rows_MF[:, cell]) for cell in self.fragment.slices])


SHAPES["mean-with-liars"] = LyingReduction


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    reducer: str
    attack: str
    liars: int
    clipped: bool
    """whether norms are clipped to twice their median"""
    valid_loss: float | None
    """final held-out loss in nats per byte; None if the run diverged"""
    seconds: float


def settings(options: argparse.Namespace) -> Settings:
    return Settings(
        workers=WORKERS,
        tokens=options.rounds * INNER_STEPS * WORKERS * options.batch_size * options.seq_len,
        inner_steps=INNER_STEPS,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        overrides={"dim": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 192},
        lr=2e-3,
        min_lr_ratio=0.5,
        points=2,
    )


def method_of(options: argparse.Namespace, row: dict) -> methods.Method:
    lr, momentum = outer_defaults(options.rounds, INNER_STEPS, WORKERS)
    return LyingMethod(
        lr=lr,
        momentum=momentum,
        clip_at=CLIP_AT if row["clipped"] else 0.0,
        reducer=row["reducer"],
        attack=row["attack"],
        liars=row["liars"],
    )


def plan(options: argparse.Namespace) -> list[dict]:
    """Return the runs of the table, honest ones first."""
    cases = [("none", 0), *((a, n) for a in options.attacks.split(",") for n in options.liars)]
    return [
        {"reducer": reducer, "attack": attack, "liars": liars, "clipped": clipped}
        for attack, liars in cases
        for clipped in (True, False)
        for reducer in options.reducers.split(",")
    ]


def run(bench: Bench, folder: Folder, options: argparse.Namespace, case: dict) -> Row:
    began_s = time.perf_counter()
    loss = None
    try:
        result = simulate(
            bench,
            method_of(options, case),
            seed=0,
            folder=folder,
            rerun=options.rerun,
            say=lambda line: None,
        )
        loss = result.valid_loss if result.valid_loss < BLOW_UP else None
        seconds = result.seconds
    except (GroupError, StateError):  # parameters that are no longer finite
        seconds = time.perf_counter() - began_s
    row = Row(**case, valid_loss=loss, seconds=round(seconds, 1))
    print(f"{words(row)}: {cell(row)}, {row.seconds:.0f} s", file=sys.stderr, flush=True)
    return row


def words(row: Row) -> str:
    who = f"{row.liars} of {WORKERS} {row.attack}" if row.liars else "no liars"
    return f"{row.reducer}, {'clipped' if row.clipped else 'not clipped'}, {who}"


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "lost" if row.valid_loss is None else f"{row.valid_loss:.3f}"


def table(rows: Sequence[Row]) -> str:
    """Format the final losses as Markdown: one row per case, one column per reducer."""
    known = {(r.attack, r.liars, r.clipped, r.reducer): r for r in rows}
    names = [name for name in REDUCERS if any(r.reducer == name for r in rows)]
    cases = list(dict.fromkeys((r.attack, r.liars, r.clipped) for r in rows))
    lines = [
        f"| attack | liars | norms clipped | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for attack, liars, clipped in cases:
        cells = [cell(known.get((attack, liars, clipped, name))) for name in names]
        yes = "yes" if clipped else "no"
        lines.append(f"| {attack} | {liars} | {yes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(rows: Sequence[Row]) -> None:
    """Write the table between the marks of the page."""
    put_between(PAGE, MARKS, table(rows))


def report(rows: Sequence[Row], chosen: Settings) -> dict:
    return {
        "date": today(),
        "commit": commit(),
        "settings": asdict(chosen),
        "alie_z": ALIE_Z,
        "rows": [asdict(row) for row in rows],
    }


def store(found: dict) -> None:
    new = SAVED.with_suffix(".tmp")
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, SAVED)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--reducers",
        default=",".join(REDUCERS),
        help="comma-separated reduction rules (default all)",
    )
    add("--attacks", default=",".join(ATTACKS), help="comma-separated attacks (default all)")
    add(
        "--liars",
        type=int,
        nargs="*",
        default=[1, 2],
        help=f"number of liars among the {WORKERS} workers (default 1 2)",
    )
    add("--rounds", type=int, default=10, help=f"rounds of {INNER_STEPS} steps (default 10)")
    add("--batch-size", type=int, default=4, help="sequences per worker and step (default 4)")
    add("--seq-len", type=int, default=64, help="tokens per sequence (default %(default)s)")
    add("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    add("--rerun", action="store_true", help="measure again")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    torch.set_num_threads(options.threads)
    chosen = settings(options)
    bench, folder = Bench(chosen), Folder(CACHE, chosen)
    rows = [run(bench, folder, options, case) for case in plan(options)]
    return report(rows, chosen)


def main() -> None:
    options = arguments()
    only_show = SAVED.exists() and len(sys.argv) <= 1 + options.json
    found = json.loads(SAVED.read_text()) if only_show else measure(options)
    rows = [Row(**row) for row in found["rows"]]
    if options.save:
        store(found)
        write_page(rows)
    print(table(rows))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
