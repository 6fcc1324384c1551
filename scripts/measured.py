"""Write peer/lab/measured.json, the losses that advice goes by, from what docs/benchmarks holds.

    scripts/measured.py            say what would be in it
    scripts/measured.py --write

Rows are compared as `bench_methods` does: each method at its own rate, over the seeds that both
have. Of a method that was measured several times the row of the longest run counts, then of most
seeds, then of `diloco`'s window, then the lowest. A row needs four workers, and `diloco` with int8
and `ddp` beside it.
"""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

from bench_methods import above, best, grouped

from atoll.compression import Codec
from atoll.optim import methods
from atoll.peer.lab.advice import window_gap
from atoll.peer.lab.simulation_settings import Settings

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "peer" / "lab" / "measured.json"
BENCHMARKS = ROOT / "docs" / "benchmarks"
WORKERS = 4  # in the tables of methods and windows
BY_WORKERS = (1, 2, 4, 8)
LONG_STEPS = 1_600  # of the table by windows: the longest that docs/benchmarks/outer.json has


def name_of(settings):
    """The method's spec without what a run of this length and size takes by itself."""
    method, given = methods.parse(settings["spec"]), methods.given(settings["spec"])
    run = run_of(settings)
    left_open = methods.defaults_for(
        method.name,
        rounds=max(1, run.steps // run.inner_steps),
        inner_steps=run.inner_steps,
        peers=run.workers,
    ) | {"clip_norm": run.clip_norm}
    kept = [
        field.name
        for field in fields(method)
        if field.name in given and getattr(method, field.name) != left_open.get(field.name)
    ]
    options = ", ".join(f"{name}={text(getattr(method, name))}" for name in kept)
    return f"{method.name}({options})" if options else method.name


def run_of(settings):
    """What was run, apart from the method."""
    known = {field.name for field in fields(Settings)}
    return Settings(**{key: value for key, value in settings.items() if key in known})


def text(value):
    return value.spec if isinstance(value, Codec) else str(value)


def groups():
    """Rows that are compared, of methods with their own inner optimizers."""
    rows = json.loads((BENCHMARKS / "methods.json").read_text())
    own = [row for row in rows if not row["settings"].get("inner")]
    return grouped([row for row in own if row["workers"] == WORKERS])


def table():
    """The fields of `Measured` for each method, those of the longest runs first."""
    kept = {}
    for group in groups():
        named = [row | {"name": name_of(row["settings"])} for row in group]
        diloco = best([row for row in named if row["name"] == "diloco"], "diloco")
        if diloco is None or best(group, "ddp") is None:
            continue
        for row in named:
            rank = rank_of(row, diloco)
            if row["name"] not in kept or rank > kept[row["name"]][0]:
                kept[row["name"]] = rank, entry(row, diloco)
    return [fields_ for _, fields_ in sorted(kept.values(), key=lambda pair: pair[0])[::-1]]


def rank_of(row, diloco):
    """The greatest is taken."""
    own = row["settings"]
    beside = own["inner_steps"] == diloco["settings"]["inner_steps"]
    return own["tokens"], row["seeds"], beside, -row["valid_loss"]


def entry(row, diloco):
    """What is written of a row."""
    own = row["settings"]
    return {
        "spec": row["name"],
        "to_diloco": round(at_equal_windows(row, diloco), 4),
        "to_ddp": round(row["gap_to_ddp"], 4),
        **{key: own[key] for key in ("params", "tokens", "workers", "inner_steps")},
        "seeds": row["seeds"],
    }


def at_equal_windows(row, diloco):
    """Share above `diloco`, less what `diloco` itself loses by windows of the row's length."""
    if methods.parse(row["settings"]["spec"]).every_step:
        return above(row, diloco)
    mine, its = (
        1 + window_gap(each["settings"]["inner_steps"], by_window()) for each in (row, diloco)
    )
    return (1 + above(row, diloco)) * its / mine - 1


def by_window():
    """H and the gap to data parallel, of the long table of outer.json."""
    saved = json.loads((BENCHMARKS / "outer.json").read_text()).values()
    long = [row for row in saved if row["settings"]["steps"] == LONG_STEPS]
    (base,) = [row["valid_loss"] for row in long if row["settings"]["method"] == "adamw"]
    gaps = {
        row["settings"]["inner_steps"]: round(row["valid_loss"] / base - 1, 4)
        for row in long
        if row["settings"]["method"] == "diloco"
    }
    return [(1, 0.0), *sorted(gaps.items())]


def by_workers():
    """The gap to data parallel by number of workers, of each method, where all of it was measured.

    Of rows that differ in the method, its window and the number of workers alone.
    """
    alike = {}
    for row in json.loads((BENCHMARKS / "methods.json").read_text()):
        own = replace(run_of(row["settings"]), workers=WORKERS, inner_steps=1)
        alike.setdefault(repr(own), []).append(row)
    found = {}
    for group in alike.values():
        base = {row["workers"]: row["valid_loss"] for row in group if row["method"] == "ddp"}
        for name in sorted({row["method"] for row in group}):
            gaps = gaps_by_workers([row for row in group if row["method"] == name], base)
            if set(BY_WORKERS) <= set(gaps):
                found[name] = sorted(gaps.items())
    return found


def gaps_by_workers(rows, base):
    """Of a method's setting that was measured with most numbers of workers."""
    named = {}
    for row in rows:
        if row["workers"] in base:
            gap = round(row["valid_loss"] / base[row["workers"]] - 1, 4)
            kind = name_of(row["settings"]), row["settings"]["inner_steps"]
            named.setdefault(kind, {})[row["workers"]] = gap
    return max(named.values(), key=len, default={})


def document():
    """Return the text of peer/lab/measured.json: a row a line, so that changes can be read."""
    by_workers_rows = [
        f"  {json.dumps(name)}: {json.dumps(gaps)}" for name, gaps in by_workers().items()
    ]
    rows = [f"  {json.dumps(row)}" for row in table()]
    lines = [
        "{",
        f' "gap_by_window": {json.dumps(by_window())},',
        ' "gap_by_workers": {',
        ",\n".join(by_workers_rows),
        " },",
        ' "methods": [',
        ",\n".join(rows),
        " ]",
        "}",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    if parser.parse_args().write:
        TARGET.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
