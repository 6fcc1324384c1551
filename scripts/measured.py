"""Write peer/measured.py, the losses that advice goes by, from what docs/benchmarks holds.

    scripts/measured.py            say what would be in it
    scripts/measured.py --write

Of a method that was measured several times the row of the longest run counts, then of most seeds.
A row needs `diloco` with int8 and `ddp` in the same settings to be compared with.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

from atoll.compression import Codec
from atoll.optim import methods
from atoll.peer.simulation_settings import Settings

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "peer" / "measured.py"
BENCHMARKS = ROOT / "docs" / "benchmarks"
LONG_STEPS = 1_600  # of the table by windows: the longest that docs/benchmarks/outer.json has


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of methods.json under the name that a run would give its method."""

    spec: str
    group: str
    settings: dict
    seeds: int
    loss: float

    @property
    def evidence(self):
        return self.settings["tokens"], self.seeds


def name_of(settings):
    """The method's spec without what a run of this length and size takes by itself."""
    method, given = methods.parse(settings["spec"]), methods.given(settings["spec"])
    known = {field.name for field in fields(Settings)}
    run = Settings(**{key: value for key, value in settings.items() if key in known})
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


def text(value):
    return value.spec if isinstance(value, Codec) else str(value)


def rows():
    """Rows whose methods take their own inner optimizers."""
    for row in json.loads((BENCHMARKS / "methods.json").read_text()):
        settings = row["settings"]
        if settings.get("inner"):
            continue
        shared = {key: value for key, value in settings.items() if key not in ("spec", "inner")}
        yield Row(
            spec=name_of(settings),
            group=json.dumps([row["seeds"], shared], sort_keys=True),
            settings=settings,
            seeds=row["seeds"],
            loss=row["valid_loss"],
        )


def table():
    """The fields of `Measured` for each method, those of the longest runs first."""
    by_group = {}
    for row in rows():
        by_group.setdefault(row.group, {})[row.spec] = row
    best = {}
    for group in by_group.values():
        if {"ddp", "diloco"} <= group.keys():
            for spec, row in group.items():
                if spec not in best or row.evidence > best[spec][0].evidence:
                    best[spec] = row, group
    return [
        {
            "spec": spec,
            "to_diloco": round(row.loss / group["diloco"].loss - 1, 4),
            "to_ddp": round(row.loss / group["ddp"].loss - 1, 4),
            "params": row.settings["params"],
            "tokens": row.settings["tokens"],
            "workers": row.settings["workers"],
            "inner_steps": row.settings["inner_steps"],
            "seeds": row.seeds,
        }
        for spec, (row, group) in sorted(best.items(), key=lambda kv: kv[1][0].evidence)[::-1]
    ]


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


def module():
    """The text of peer/measured.py."""
    lines = [
        '"""Losses that were measured; scripts/measured.py writes this file from docs/."""',
        "",
        "from dataclasses import dataclass",
        "",
        "",
        "@dataclass(frozen=True, kw_only=True)",
        "class Measured:",
        '    """How a method ended in a simulation of `atoll simulate`."""',
        "",
        "    spec: str",
        '    """Without what follows the run by itself."""',
        "    to_diloco: float",
        '    """Share above the loss of `diloco` with int8, in the same settings."""',
        "    to_ddp: float",
        '    """Share above the loss of data parallel."""',
        "    params: int",
        "    tokens: int",
        '    """Of all workers together."""',
        "    workers: int",
        "    inner_steps: int",
        "    seeds: int",
        "",
        "",
        "GAP_BY_WINDOW = (",
        *(f"    ({inner_steps}, {gap})," for inner_steps, gap in by_window()),
        ")",
        '"""H, and the share by which `diloco` with int8 ends above data parallel."""',
        "",
        "METHODS = (",
    ]
    for row in table():
        lines.append("    Measured(")
        lines += [f"        {key}={literal(value)}," for key, value in row.items()]
        lines.append("    ),")
    return "\n".join([*lines, ")"]) + "\n"


def literal(value):
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:_}" if isinstance(value, int) else repr(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    if parser.parse_args().write:
        TARGET.write_text(module(), encoding="utf-8")
    else:
        print(module(), end="")


if __name__ == "__main__":
    main()
