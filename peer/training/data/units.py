"""Exactly-once data, the trainer's side: the rows of the units that the log hands to this peer.

A pass has an order of its own: place `i` of pass `k` is row `permuted(seed, k)(i)` of the text, a
Feistel network that walks until it is inside (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002), so no list of rows is kept. Unit `u` is `unit_rows` places from `u * unit_rows` on:
those of one inner step. Rows behind the last whole unit are left out, others in each pass.

The log says which units this peer holds (`atoll.optim.log.units`). It trains on them in their
order, and each contribution says how many it has done. What was left out of an update stays in the
drift, and its units in the next contribution. What the method drops is trained again.

# B rows of a unit, T positions
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.reducer import Commit
from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import Corpus, check_state

FEISTEL_ROUNDS = 6
Words = np.ndarray[Any, np.dtype[np.uint64]]


def unit_rows(spec: RunSpec) -> int:
    """Return the rows of a unit: those of one inner step."""
    return spec.inner.batch_size * spec.inner.grad_accumulation


def count_units(spec: RunSpec, corpus: Corpus) -> int:
    """Return the whole units of a text.

    Raises:
        DataError: it has none, or its length is not known.
    """
    rows = corpus.num_rows(spec.data.seq_len)
    if rows is None:
        raise DataError(
            "data.once: the number of rows of a streamed data set is not known; write it as shards "
            "with `atoll shards`"
        )
    if rows < unit_rows(spec):
        raise DataError(
            f"data.once: expected at least {unit_rows(spec)} rows, those of an inner step, got "
            f"{rows}; add text, or reduce inner.batch_size or data.seq_len"
        )
    return rows // unit_rows(spec)


def permuted(places_B: Words, *, count: int, seed: int, number: int) -> Words:
    """Return where places of a pass lie among `count` rows; all places have different rows."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    digest = hashlib.shake_256(f"rows/{seed}/{number}".encode()).digest(8 * FEISTEL_ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8")
    found_B = _feistel(places_B, keys, np.uint64(half), mask)
    while (outside := found_B >= np.uint64(count)).any():
        found_B[outside] = _feistel(found_B[outside], keys, np.uint64(half), mask)
    return found_B


def _feistel(words_B: Words, keys: Words, half: np.uint64, mask: np.uint64) -> Words:
    left_B, right_B = words_B >> half, words_B & mask
    for key in keys:
        left_B, right_B = right_B, left_B ^ (_mixed(right_B, key) & mask)
    return (left_B << half) | right_B


def _mixed(words_B: Words, key: np.uint64) -> Words:
    """Return words that look random: the finaliser of SplitMix64."""
    mixed_B: Words = words_B + key  # wraps, as the products do
    mixed_B = (mixed_B ^ (mixed_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_B = (mixed_B ^ (mixed_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_B ^ (mixed_B >> np.uint64(31))


class HeldUnits:
    """The units that this peer holds, and what has become of those that it trained on."""

    def __init__(self) -> None:
        """Hold none."""
        self.number = 0
        """The pass."""
        self._units: list[tuple[int, int]] = []
        self._used = 0
        """Units at the front whose work is in the drift."""
        self._handed_in: int | None = None
        """The number of these that the contribution under way has; None if none is under way."""
        self._may_train = False
        """False until the contribution is handed in that counts for nothing, as a joiner's first
        does (docs/protocol.md, part 3): nothing is trained for it."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is none left to train on."""
        return self._used >= sum(stop - start for start, stop in self._units)

    def take(self) -> int:
        """Return the next unit, whose work is in the drift from now on.

        Raises:
            IndexError: there is none.
        """
        left = self._used
        for start, stop in self._units:
            if left < stop - start:
                self._used += 1
                return start + left
            left -= stop - start
        raise IndexError("this peer holds no further unit")

    def hand_in(self, tokens: int) -> int:
        """Return how many units a contribution has done; one without tokens has lost its work."""
        self._may_train = True
        if tokens == 0:
            self._used = 0
        self._handed_in = self._used
        return self._used

    def settle(self, commit: Commit) -> None:
        """Take the units that are held after an entry."""
        if commit.reset:
            self._units, self._used, self._handed_in = [], 0, None
            self._may_train = False
            return
        if commit.settles and self._handed_in is not None:
            if commit.counts:
                self._used -= self._handed_in
            self._handed_in = None
        if self._may_train and commit.units:
            # They begin with those in use, or the reducer resets this peer next.
            self.number, *bounds = commit.units
            self._units = list(zip(bounds[::2], bounds[1::2], strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the units as plain values."""
        return {
            "kind": "units",
            "number": self.number,
            "units": [list(pair) for pair in self._units],
            "used": self._used,
            "may_train": self._may_train,
            "handed_in": -1 if self._handed_in is None else self._handed_in,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            DataError: it is the state of another kind of data.
        """
        kinds = {"number": int, "units": list, "used": int, "handed_in": int, "may_train": bool}
        check_state(state, "units", **kinds)
        self.number, self._used = state["number"], state["used"]
        self._units = [(start, stop) for start, stop in state["units"]]
        self._may_train = state["may_train"]
        self._handed_in = None if state["handed_in"] < 0 else state["handed_in"]


class UnitStream:
    """The batches of the units that this peer holds."""

    def __init__(self, spec: RunSpec, corpus: Corpus) -> None:
        """Read a text by rows.

        Raises:
            DataError: it has another number of units than the run.
        """
        self.held = HeldUnits()
        self._corpus, self._seed, self._rows = corpus, spec.run.seed, unit_rows(spec)
        self._batches, self._seq_len = spec.inner.grad_accumulation, spec.data.seq_len
        self._count = corpus.num_rows(self._seq_len) or 0
        if (found := count_units(spec, corpus)) != spec.data.units:
            raise DataError(
                f"expected a text of {spec.data.units} units (data.units), got {found}; train on "
                "the run's own text"
            )

    def next_batches(self) -> list[Tensor]:
        """Return the batches `(B, T + 1)` of the next unit, of which there must be one."""
        first = self.held.take() * self._rows
        places_B = np.arange(first, first + self._rows, dtype=np.uint64)
        rows_B = permuted(places_B, count=self._count, seed=self._seed, number=self.held.number)
        rows_BT = self._corpus.rows(rows_B, self._seq_len)
        return list(rows_BT.chunk(self._batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the units that are held, and how far the trainer is."""
        return self.held.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; raise DataError if it is of another kind."""
        self.held.load_state_dict(state)

    def close(self) -> None:
        """Do nothing: no thread reads ahead."""
