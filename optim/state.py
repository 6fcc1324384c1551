"""The state every replica holds in the same bits, and its snapshot.

A snapshot is params_N then momentum_N, fp32, little-endian, without header or padding: 8 bytes
a parameter. It is cut into leaves of 1 MiB, the last one perhaps shorter. The state root is

    node(left, right) = SHA-256(0x01 | left | right)          an odd node moves up unchanged
    root              = SHA-256("atoll-state-root-1" | u64 big-endian number of leaves | top)

over the SHA-256 of each leaf. The number of leaves in the root keeps an inner node from passing
as a leaf. The position is not in the snapshot: who states a root states its position.

    StateError (ValueError)
      SnapshotMismatch   digests that do not make up the root, or a number that the layout denies
      LeafRefused        bytes of a leaf with the wrong index, length or digest
      SnapshotIncomplete finish() before every leaf was there
      NotFinite          parameters or momentum with NaN or infinity
"""

import hashlib
import struct
import sys
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from atoll.optim.layout import Layout

LEAF_BYTES = 1 << 20  # 0.1 s at 100 Mbit/s: small enough to spread over donors and to retry
DIGEST_BYTES = 32
_NODE = b"\x01"
_ROOT = b"atoll-state-root-1"
_CHECK = 1 << 22  # values looked at for NaN at once, 16 MiB: bounds the temporary


class StateError(ValueError):
    """A state or snapshot that can't be taken."""


class SnapshotMismatch(StateError):  # noqa: N818
    """Leaf digests that do not belong to the root or to the layout."""


class LeafRefused(StateError):  # noqa: N818
    """A leaf with the wrong index, length or digest."""


class SnapshotIncomplete(StateError):  # noqa: N818
    """A snapshot that lacks leaves."""


class NotFinite(StateError):  # noqa: N818
    """NaN or infinity where a number must be."""


class OuterState:
    """Parameters and outer momentum after the entry before `position`.

    Immutable by convention: applying an update writes new buffers, so a state can be hashed and
    served to joiners while training goes on. The tensors are views of the snapshot's bytes.
    """

    def __init__(self, *, layout: Layout, position: int, buffer: bytearray) -> None:
        """Take over a snapshot buffer; use `genesis`, `blank` or `Assembly` to make one.

        Raises:
            StateError: when the buffer is not 8 bytes a parameter.
        """
        if len(buffer) != snapshot_bytes(layout):
            raise StateError(f"expected {snapshot_bytes(layout)} bytes, got {len(buffer)}")
        self.layout = layout
        self.position = position
        self._buffer = buffer
        self.params_N = _view(buffer, layout.numel, 0)
        self.momentum_N = _view(buffer, layout.numel, 4 * layout.numel)

    @classmethod
    def genesis(cls, layout: Layout, params_N: Tensor) -> "OuterState":
        """The state at position 0: the given parameters, momentum zero.

        Raises:
            StateError: when the vector has another length.
            NotFinite: when it holds NaN or infinity.
        """
        if params_N.shape != (layout.numel,):
            raise StateError(
                f"expected {layout.numel} parameters, got shape {tuple(params_N.shape)}"
            )
        state = cls.blank(layout, 0)
        state.params_N.copy_(params_N)
        state.require_finite()
        return state

    @classmethod
    def blank(cls, layout: Layout, position: int) -> "OuterState":
        """A state of zeros, for apply to write."""
        return cls(layout=layout, position=position, buffer=bytearray(snapshot_bytes(layout)))

    def at(self, position: int) -> "OuterState":
        """The same bits at another position: what an entry without an update leaves."""
        return OuterState(layout=self.layout, position=position, buffer=self._buffer)

    @property
    def snapshot_bytes(self) -> int:
        """Length of the snapshot."""
        return len(self._buffer)

    @property
    def num_leaves(self) -> int:
        """Number of leaves of the snapshot."""
        return -(-len(self._buffer) // LEAF_BYTES)

    def read_leaf(self, index: int) -> bytes:
        """Bytes of one leaf of the snapshot.

        Raises:
            IndexError: when there is no such leaf.
        """
        if not 0 <= index < self.num_leaves:
            raise IndexError(f"expected a leaf in [0, {self.num_leaves}), got {index}")
        return bytes(self._leaf(index))

    def leaves(self) -> list[bytes]:
        """SHA-256 of each leaf; hashed once, about 0.5 s a gigabyte, without the GIL."""
        return list(self._leaves)

    def root(self) -> bytes:
        """The 32-byte state root."""
        return merkle_root(self._leaves)

    def require_finite(self) -> None:
        """Refuse NaN and infinity.

        Raises:
            NotFinite: naming the vector that holds one.
        """
        for name, vector_N in (("params", self.params_N), ("momentum", self.momentum_N)):
            if not is_finite(vector_N):
                raise NotFinite(f"expected finite numbers, got NaN or infinity in {name}")

    @cached_property
    def _leaves(self) -> tuple[bytes, ...]:
        return tuple(hashlib.sha256(self._leaf(i)).digest() for i in range(self.num_leaves))

    def _leaf(self, index: int) -> memoryview:
        return memoryview(self._buffer)[index * LEAF_BYTES : (index + 1) * LEAF_BYTES]


class Assembly:
    """Collects the leaves of a snapshot in any order, from anybody, each verified before use."""

    def __init__(
        self, *, layout: Layout, position: int, leaf_digests: Sequence[bytes], root: bytes
    ) -> None:
        """Check the digests against the root, then take memory.

        Raises:
            SnapshotMismatch: when they do not make up the root, or not this layout's snapshot.
        """
        expected = -(-snapshot_bytes(layout) // LEAF_BYTES)
        if len(leaf_digests) != expected:
            raise SnapshotMismatch(f"expected {expected} leaf digests, got {len(leaf_digests)}")
        if merkle_root(leaf_digests) != root:
            raise SnapshotMismatch("expected leaf digests of the certified root, got others")
        self._digests = tuple(leaf_digests)
        self._layout = layout
        self._position = position
        self._buffer = bytearray(snapshot_bytes(layout))
        self._missing = set(range(expected))

    @property
    def missing(self) -> frozenset[int]:
        """Indices of the leaves that are still to come."""
        return frozenset(self._missing)

    def add(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Verify a leaf and keep it; a leaf that is already there is ignored.

        Raises:
            LeafRefused: when the index, length or digest is wrong. Ask another donor.
        """
        if not 0 <= index < len(self._digests):
            raise LeafRefused(f"expected a leaf in [0, {len(self._digests)}), got {index}")
        start = index * LEAF_BYTES
        length = min(LEAF_BYTES, len(self._buffer) - start)
        if memoryview(data).nbytes != length:
            raise LeafRefused(
                f"expected {length} bytes in leaf {index}, got {memoryview(data).nbytes}"
            )
        if hashlib.sha256(data).digest() != self._digests[index]:
            raise LeafRefused(f"expected leaf {index} to have its digest, got other bytes")
        if index in self._missing:
            self._buffer[start : start + length] = data
            self._missing.discard(index)

    def finish(self) -> OuterState:
        """The state, once every leaf is there.

        Raises:
            SnapshotIncomplete: when leaves are missing.
            NotFinite: when the certified state itself holds NaN or infinity.
        """
        if self._missing:
            raise SnapshotIncomplete(
                f"expected {len(self._digests)} leaves, {len(self._missing)} are missing, "
                f"the first is {min(self._missing)}"
            )
        state = OuterState(layout=self._layout, position=self._position, buffer=self._buffer)
        state.require_finite()
        return state


def snapshot_bytes(layout: Layout) -> int:
    """Length of a snapshot of this layout: parameters and momentum, 4 bytes each."""
    return 8 * layout.numel


def merkle_root(leaf_digests: Sequence[bytes]) -> bytes:
    """Root over leaf digests, as the module's docstring says.

    Raises:
        SnapshotMismatch: when there is none, or one is not 32 bytes.
    """
    if not leaf_digests or any(len(digest) != DIGEST_BYTES for digest in leaf_digests):
        raise SnapshotMismatch("expected at least one digest, of 32 bytes each")
    level = list(leaf_digests)
    while len(level) > 1:
        level = [_node(level[i : i + 2]) for i in range(0, len(level), 2)]
    count = struct.pack(">Q", len(leaf_digests))
    return hashlib.sha256(_ROOT + count + level[0]).digest()


def is_finite(vector_N: Tensor) -> bool:
    """Whether a vector holds neither NaN nor infinity; takes little memory."""
    return all(bool(torch.isfinite(piece).all()) for piece in torch.split(vector_N, _CHECK))


def _node(pair: list[bytes]) -> bytes:
    return hashlib.sha256(_NODE + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0]


def _view(buffer: bytearray, numel: int, offset: int) -> Tensor:
    if sys.byteorder != "little":
        raise StateError("expected a little-endian machine: snapshots are little-endian")
    return torch.frombuffer(buffer, dtype=torch.float32, count=numel, offset=offset)
