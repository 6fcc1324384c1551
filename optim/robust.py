"""Means that a minority of liars cannot move far, cell by cell.

Rows are what the members sent for one cell, already clipped; all count alike, because a weight is
a member's own claim.  The owner of a part computes the result once, so it need not be the same
bits elsewhere.

    mean            the weighted mean; one liar moves it anywhere within the clip factor
    trimmed-mean    of each coordinate without its largest and smallest quarter (arXiv:1803.01498)
    median          of each coordinate (arXiv:1803.01498)
    centered-clip   the fixed point of x += mean((g - x) min(1, tau / |g - x|)) (arXiv:2012.10333,
                    as BTARD uses it, arXiv:2106.11257)

Departures: BTARD's tau is a constant that somebody has to choose for a model; here it is the median
distance from x, so the rule has no unit.  x starts at the coordinate median, as in BTARD's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

ReducerName = Literal["mean", "trimmed-mean", "median", "centered-clip"]
REDUCERS: tuple[ReducerName, ...] = get_args(ReducerName)

Rule = Callable[[Tensor], Tensor]
"""rows_MN -> one row of N values."""

TRIM = 0.25  # of the members at either end: two liars of eight
CLIP_STEPS = 10  # of centered clipping; it moves by less than 1% of the spread after five


def rule_of(name: ReducerName) -> Rule | None:
    """The rule of this name; None for the weighted mean, which needs no rows."""
    rules: dict[ReducerName, Rule] = {
        "trimmed-mean": trimmed_mean,
        "median": median,
        "centered-clip": centered_clip,
    }
    return rules.get(name)


def trimmed_mean(rows_MN: Tensor) -> Tensor:
    """Mean of each coordinate without its extremes; of fewer than three rows the plain mean."""
    num_rows = rows_MN.shape[0]
    cut = max(1, int(TRIM * num_rows)) if num_rows >= 3 else 0
    return rows_MN.sort(dim=0).values[cut : num_rows - cut].mean(dim=0)


def median(rows_MN: Tensor) -> Tensor:
    """Median of each coordinate; the mean of the two middle ones where their number is even."""
    num_rows = rows_MN.shape[0]
    sorted_MN = rows_MN.sort(dim=0).values
    return (sorted_MN[(num_rows - 1) // 2] + sorted_MN[num_rows // 2]) / 2


def centered_clip(rows_MN: Tensor) -> Tensor:
    """The mean of rows whose distance from it is clipped to the median distance."""
    center_N = median(rows_MN)
    for _ in range(CLIP_STEPS):
        away_MN = rows_MN - center_N
        distance_M = torch.linalg.vector_norm(away_MN, dim=1)
        tau = distance_M.median()
        if tau == 0:
            break
        scale_M = (tau / distance_M.clamp_min(1e-30)).clamp_max(1.0)
        center_N = center_N + (away_MN * scale_M[:, None]).mean(dim=0)
    return center_N
