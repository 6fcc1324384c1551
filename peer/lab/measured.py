"""Measured losses that advice uses, from `measured.json`, which `scripts/measured.py` writes."""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Final loss of a method in `atoll simulate`, relative to other methods."""

    spec: str
    """Spec of the method, without options that follow from the run."""
    to_diloco: float
    """Fraction above the loss of `diloco` with int8 and windows of the same length."""
    to_ddp: float
    """Fraction above the loss of data-parallel training."""
    params: int
    tokens: int
    """Tokens of all workers together."""
    workers: int
    inner_steps: int
    seeds: int


_DATA = json.loads(resources.files("atoll.peer.lab").joinpath("measured.json").read_text("utf-8"))

GAP_BY_WINDOW: tuple[tuple[int, float], ...] = tuple(
    (int(inner_steps), float(gap)) for inner_steps, gap in _DATA["gap_by_window"]
)
"""H, and the fraction by which `diloco` with int8 ends above data-parallel training."""

GAP_BY_WORKERS: dict[str, tuple[tuple[int, float], ...]] = {
    name: tuple((int(workers), float(gap)) for workers, gap in gaps)
    for name, gaps in _DATA["gap_by_workers"].items()
}
"""Workers, and the fraction by which a method ends above data-parallel training with as many."""

METHODS: tuple[Measured, ...] = tuple(Measured(**row) for row in _DATA["methods"])
"""One row per method and setting, longest runs first."""
