"""Means that a minority of liars cannot move far, cell by cell.

Rows are members' values of one cell, already clipped; all count alike, because a weight is a
member's own claim. The owner of a part computes the result once, so it need not be the same
bits elsewhere.

    mean            the weighted mean; one liar moves it anywhere within the clip factor
    trimmed-mean    of each coordinate without its largest and smallest quarter (arXiv:1803.01498)
    median          of each coordinate (arXiv:1803.01498)
    centered-clip   the fixed point of x += mean((g - x) min(1, tau / |g - x|)) (arXiv:2012.10333,
                    as BTARD uses it, arXiv:2106.11257)
    flag-aggregator the sum of the rows, each of length 1, as a subspace near most of them sees it
                    (arXiv:2302.05865)

Departures: BTARD's tau is a constant that somebody has to choose for a model; here it is the median
distance from x, so the rule has no unit. x starts at the coordinate median, as in BTARD's code.
The Flag Aggregator gives a direction and leaves the length to the learning rate; here the length is
the median of what the rows go that way, because an outer step needs one. It starts from equal
weights, not from a random subspace, and has no pairwise terms (the paper's lambda is 0, as in its
own runs without augmented data).

# M rows, N values, K dimensions of the subspace
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

ReducerName = Literal["mean", "trimmed-mean", "median", "centered-clip", "flag-aggregator"]
REDUCERS: tuple[ReducerName, ...] = get_args(ReducerName)

Rule = Callable[[Tensor], Tensor]
"""rows_MN -> one row of N values."""

TRIM = 0.25  # of the members at either end: two liars of eight
CLIP_STEPS = 10  # of centered clipping; it moves by less than 1% of the spread after five
FLAG_STEPS = 10  # of reweighting at most; the authors' code takes one to four
FLAG_EPS = 1e-7  # beside squared sines, so that a row within the subspace has a finite weight
RANK_EPS = 1e-12  # an eigenvalue below this share of the largest is rounding


def rule_of(name: ReducerName) -> Rule | None:
    """Return the rule of this name; None for the weighted mean, which needs no rows."""
    rules: dict[ReducerName, Rule] = {
        "trimmed-mean": trimmed_mean,
        "median": median,
        "centered-clip": centered_clip,
        "flag-aggregator": flag_aggregator,
    }
    return rules.get(name)


def trimmed_mean(rows_MN: Tensor) -> Tensor:
    """Average each coordinate without its extremes; of fewer than three rows return the mean."""
    num_rows = rows_MN.shape[0]
    cut = max(1, int(TRIM * num_rows)) if num_rows >= 3 else 0
    return rows_MN.sort(dim=0).values[cut : num_rows - cut].mean(dim=0)


def median(rows_MN: Tensor) -> Tensor:
    """Return the median of each coordinate; of an even number, the mean of the two middle ones."""
    num_rows = rows_MN.shape[0]
    sorted_MN = rows_MN.sort(dim=0).values
    return (sorted_MN[(num_rows - 1) // 2] + sorted_MN[num_rows // 2]) / 2


def centered_clip(rows_MN: Tensor) -> Tensor:
    """Return the mean of the rows, each clipped to the median distance from that mean."""
    center_N = median(rows_MN)
    for _ in range(CLIP_STEPS):
        away_MN = rows_MN - center_N
        distance_M = torch.linalg.vector_norm(away_MN, dim=1)
        tau = distance_M.median()
        if tau == 0:  # at least half of the rows are the center: nothing moves it
            break
        # 1e-30 stands for a distance of 0: such a row has the scale 1, and moves nothing.
        scale_M = (tau / distance_M.clamp_min(1e-30)).clamp_max(1.0)
        center_N = center_N + (away_MN * scale_M[:, None]).mean(dim=0)
    return center_N


def flag_aggregator(rows_MN: Tensor) -> Tensor:
    """Return the direction that most rows agree on, with the length of the middle row along it.

    A row counts by its line, not by its sign: one of the opposite sign shares the subspace and
    subtracts its unit from the sum. Of fewer than three rows it is the plain mean: the subspace
    holds both.
    """
    if rows_MN.shape[0] < 3:
        return rows_MN.mean(dim=0)
    norm_M = torch.linalg.vector_norm(rows_MN, dim=1)
    unit_MN = rows_MN / norm_M.clamp_min(1e-30)[:, None]
    share_M = flag_shares((unit_MN @ unit_MN.T).double())
    sum_N: Tensor = share_M.to(unit_MN.dtype) @ unit_MN
    length = torch.linalg.vector_norm(sum_N)
    if length == 0:  # opposite rows cancel: there is no direction
        return sum_N
    direction_N: Tensor = sum_N / length
    # Not the mean of the projections: by that, two sign flips of eight would halve every step.
    return direction_N * median(rows_MN @ direction_N)


def flag_shares(gram_MM: Tensor) -> Tensor:
    """Return each unit row's weight in the sum of all projections on the flag median.

    The flag median is the subspace of ceil((M + 1) / 2) dimensions with the least sum of sines of
    the angles between it and the rows: iteratively reweighted least squares, with 1 / sine as the
    weight of a row's square. All of it lies in the span of the rows, so the products of the rows
    with one another are enough.

    Args:
        gram_MM: these products, fp64.

    Returns:
        M shares; the sum of the projections is shares @ rows.
    """
    basis_MK = _principal(gram_MM, torch.ones_like(gram_MM[0]))
    least = _squared_sines(gram_MM, basis_MK)
    for _ in range(FLAG_STEPS):
        scale_M = (least + FLAG_EPS) ** -0.25
        next_MK = _principal(gram_MM, scale_M)
        sines_M = _squared_sines(gram_MM, next_MK)
        if sines_M.sqrt().sum() >= least.sqrt().sum():
            break
        basis_MK, least = next_MK, sines_M
    return basis_MK @ (basis_MK.T @ gram_MM.sum(dim=1))


def _principal(gram_MM: Tensor, scale_M: Tensor) -> Tensor:
    """Return the orthonormal axes nearest to the scaled rows; axis k is result[:, k] @ rows."""
    num_axes = gram_MM.shape[0] // 2 + 1
    values_M, vectors_MM = torch.linalg.eigh(scale_M[:, None] * gram_MM * scale_M)
    values_K, vectors_MK = values_M[-num_axes:], vectors_MM[:, -num_axes:]
    kept = values_K > RANK_EPS * values_M[-1].clamp_min(RANK_EPS)
    axes_MK: Tensor = vectors_MK[:, kept] / values_K[kept].sqrt()
    return scale_M[:, None] * axes_MK


def _squared_sines(gram_MM: Tensor, basis_MK: Tensor) -> Tensor:
    """Return the squared sine of each row's angle with the subspace; 0 for a row of zeros."""
    return (gram_MM.diagonal() - (gram_MM @ basis_MK).square().sum(dim=1)).clamp_min(0.0)
