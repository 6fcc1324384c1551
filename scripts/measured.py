"""Write peer/lab/measured.json, the losses that advice is based on, from docs/benchmarks.

    scripts/measured.py            print it
    scripts/measured.py --write

Rows are compared as in `bench_methods`: each method at its own rate, over the seeds that both have.
If a method was measured several times, the row of the longest run counts, then the one with most
seeds, then the one with `diloco`'s window, then the one with the lowest loss. A row needs four
workers, and `diloco` with int8 and `ddp` to compare with.
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
LONG_STEPS = 1_600  # of the table by windows, the longest in docs/benchmarks/outer.json


def name_of(settings):
    """Return the method's spec without the options that a run of this size has by default."""
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
    """Return the settings of the run, apart from the method."""
    known = {field.name for field in fields(Settings)}
    return Settings(**{key: value for key, value in settings.items() if key in known})


def text(value):
    return value.spec if isinstance(value, Codec) else str(value)


def groups():
    """Return the groups of compared rows, of methods with their own inner optimizers."""
    rows = json.loads((BENCHMARKS / "methods.json").read_text())
    own = [row for row in rows if not row["settings"].get("inner")]
    return grouped([row for row in own if row["workers"] == WORKERS])


def table():
    """Return the fields of `Measured` for each method, longest runs first."""
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
    """Return the sort key of a row; the row with the highest counts."""
    own = row["settings"]
    beside = own["inner_steps"] == diloco["settings"]["inner_steps"]
    return own["tokens"], row["seeds"], beside, -row["valid_loss"]


def entry(row, diloco):
    """Return the fields to write for a row."""
    own = row["settings"]
    return {
        "spec": row["name"],
        "to_diloco": round(at_equal_windows(row, diloco), 4),
        "to_ddp": round(row["gap_to_ddp"], 4),
        **{key: own[key] for key in ("params", "tokens", "workers", "inner_steps")},
        "seeds": row["seeds"],
    }


def at_equal_windows(row, diloco):
    """Return the gap to `diloco`, minus what `diloco` itself loses by windows of this length."""
    if methods.parse(row["settings"]["spec"]).every_step:
        return above(row, diloco)
    mine, its = (
        1 + window_gap(each["settings"]["inner_steps"], by_window()) for each in (row, diloco)
    )
    return (1 + above(row, diloco)) * its / mine - 1


def by_window():
    """Return H and the gap to data parallel, from the long table of outer.json."""
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
    """Return each method's gap to data parallel by number of workers, if all were measured.

    The rows differ only in the method, its window and the number of workers.
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
    """Return the gaps of the setting that was measured with most numbers of workers."""
    named = {}
    for row in rows:
        if row["workers"] in base:
            gap = round(row["valid_loss"] / base[row["workers"]] - 1, 4)
            kind = name_of(row["settings"]), row["settings"]["inner_steps"]
            named.setdefault(kind, {})[row["workers"]] = gap
    return max(named.values(), key=len, default={})


def document():
    """Return the text of peer/lab/measured.json, one row per line to keep diffs readable."""
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
    parser.add_argument(
        "--write", action="store_true", help="write the file instead of printing it"
    )
    if parser.parse_args().write:
        TARGET.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
