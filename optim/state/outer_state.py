"""The state every replica holds in the same bits, and its snapshot.

A snapshot is params_N then memory_M, little-endian, without header or padding. The outer step keeps
memory_M from one update to the next; the method gives its length (`Method.memory_numel`) and its
format (`Method.memory_dtype`). For most methods it is momentum_N, one value a parameter; for some,
more values follow. Parameters are fp32, and so is the memory, or bf16 if the run says so. A
snapshot is cut into leaves of 1 MiB, the last one perhaps shorter. The state root is

    node(left, right) = BLAKE3(0x01 | left | right)           an odd node moves up unchanged
    root              = BLAKE3("atoll-state-root-2" | u64 big-endian number of leaves | top)

over the BLAKE3 of each leaf, which takes a quarter of the time of SHA-256. The number of leaves in
the root keeps an inner node from passing as a leaf. The position is not in the snapshot: a message
that states a root states its position.

    StateError (ValueError)
      SnapshotMismatch   digests that do not make up the root, or a number that the layout denies
      LeafRefused        bytes of a leaf with the wrong index, length or digest
      SnapshotIncomplete finish() before every leaf was there
      NotFinite          parameters or memory with NaN or infinity
      StateGone          a state whose memory the next one has taken
"""

import itertools
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from blake3 import blake3
from torch import Tensor

from atoll.compression import planes
from atoll.compression.base import CodecError
from atoll.compression.threads import share
from atoll.optim.state import halves, vectors
from atoll.optim.state.layout import Layout

LEAF_BYTES = 1 << 20  # 0.1 s at 100 Mbit/s: small enough to spread over donors and to retry
DIGEST_BYTES = 32  # of BLAKE3
LEAVES_A_RUN = 8  # hashed in a row: 1.5 ms, against which a thread's turn is little
_NODE = b"\x01"
_ROOT = b"atoll-state-root-2"


class StateError(ValueError):
    """A state or snapshot that can't be taken."""


class SnapshotMismatch(StateError):
    """Leaf digests that do not belong to the root or to the layout."""


class LeafRefused(StateError):
    """A leaf with the wrong index, length or digest."""


class SnapshotIncomplete(StateError):
    """A snapshot that lacks leaves."""


class NotFinite(StateError):
    """NaN or infinity in the parameters or the memory."""


class StateGone(StateError):
    """A state that the next one has overwritten."""


class _Readers:
    """Count the readers of a state, and end reading before the next one takes its place."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._gone = False

    def add(self) -> None:
        with self._lock:
            if self._gone:
                raise StateGone("expected a state, got one that the next one has overwritten")
            self._count += 1

    def remove(self) -> None:
        with self._lock:
            self._count -= 1

    def end(self) -> bool:
        """Let nobody read any more; False if somebody does."""
        with self._lock:
            self._gone = self._gone or self._count == 0
            return self._gone


class OuterState:
    """Parameters and the outer step's memory after the entry before `position`.

    Immutable, and an update is applied in new buffers, until its owner lets it `give_way`: then the
    next state takes the place of this one. Whoever reads one beside that does so while it is
    `kept`.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        position: int,
        params_N: Tensor,
        memory_M: Tensor,
        readers: _Readers | None = None,
        allocate: vectors.Allocate = vectors.empty,
    ) -> None:
        """Take over vectors on the CPU, parameters in fp32; consecutive states may share a memory.

        `allocate` makes the vectors of the states after this one.
        """
        self.layout = layout
        self.allocate = allocate
        self.position = position
        self.params_N = params_N
        self.memory_M = memory_M
        self.gives_memory = False
        """True once the next state may be written to `memory_M`, and to the update."""
        self.gives_params = False
        """True once it may be written to `params_N` too."""
        self._readers = readers or _Readers()
        self._hashing = Lock()
        self._digests: tuple[bytes, ...] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the values as they are for the time of the block.

        Raises:
            StateGone: the next state has taken their place.
        """
        release = self.keep()
        try:
            yield
        finally:
            release()

    def keep(self) -> Callable[[], None]:
        """Keep the values as they are until the result is called, in any thread, once or more.

        Raises:
            StateGone: the next state has taken their place.
        """
        self._readers.add()
        held = [self._readers]

        def release() -> None:
            while held:
                held.pop().remove()

        return release

    def give_way(self, *, params: bool) -> bool:
        """Let the next state overwrite this one; False if somebody keeps it.

        Args:
            params: whether it may overwrite the parameters too. If not, the next ones take the
                place of the update that leads to them, and these remain as they are.
        """
        if not self._readers.end():
            return False
        self.gives_memory, self.gives_params = True, params
        return True

    @property
    def momentum_N(self) -> Tensor:  # noqa: N802
        """Return the first N values of the memory; a view."""
        return self.memory_M[: self.layout.numel]

    @classmethod
    def genesis(
        cls, layout: Layout, params_N: Tensor, memory_M: Tensor | None = None
    ) -> "OuterState":
        """Return the state at position 0, of these vectors, which nobody else may change.

        Args:
            layout: of the parameters.
            params_N: theta, fp32 on the CPU.
            memory_M: what the method begins with (`Method.genesis`), fp32 or bf16; by default a
                momentum of zero.

        Raises:
            StateError: when the vector has another length.
            NotFinite: when it holds NaN or infinity.
        """
        if params_N.shape != (layout.numel,):
            raise StateError(
                f"expected {layout.numel} parameters, got shape {tuple(params_N.shape)}"
            )
        if memory_M is None:
            memory_M = torch.zeros(layout.numel)
        state = cls(layout=layout, position=0, params_N=params_N, memory_M=memory_M)
        state.require_finite()
        return state

    @classmethod
    def blank(
        cls,
        layout: Layout,
        position: int,
        memory_numel: int | None = None,
        memory_dtype: torch.dtype = torch.float32,
    ) -> "OuterState":
        """Return a state of zeros; by default its memory is a momentum."""
        numel = layout.numel if memory_numel is None else memory_numel
        memory_M = torch.zeros(numel, dtype=memory_dtype)
        params_N = torch.zeros(layout.numel)
        return cls(layout=layout, position=position, params_N=params_N, memory_M=memory_M)

    def next_blank(self) -> "OuterState":
        """Return the next state with uninitialised parameters and memory of the same lengths."""
        return self._next(self.allocate(self.memory_M.numel(), self.memory_M.dtype))

    def next_with_memory(self) -> "OuterState":
        """Return the next state with uninitialised parameters, sharing this state's memory.

        A rule without a momentum leaves the memory as it is, and a copy would cost a pass over it.
        """
        return self._next(self.memory_M)

    def next_of(self, params_N: Tensor) -> "OuterState":
        """Return the next state, of these parameters and of the memory of this one."""
        return OuterState(
            layout=self.layout,
            position=self.position + 1,
            params_N=params_N,
            memory_M=self.memory_M,
            allocate=self.allocate,
        )

    def at(self, position: int) -> "OuterState":
        """Return the same state at another position, as after an entry without an update."""
        return OuterState(
            layout=self.layout,
            position=position,
            params_N=self.params_N,
            memory_M=self.memory_M,
            readers=self._readers,
            allocate=self.allocate,
        )

    def moved(self, allocate: vectors.Allocate) -> "OuterState":
        """Return the same state, and those after it, in vectors that `allocate` makes."""
        if self.allocate == allocate:
            return self
        params_N = allocate(self.params_N.numel()).copy_(self.params_N)
        memory_M = allocate(self.memory_M.numel(), self.memory_M.dtype).copy_(self.memory_M)
        state = OuterState(
            layout=self.layout,
            position=self.position,
            params_N=params_N,
            memory_M=memory_M,
            allocate=allocate,
        )
        state._digests = self._digests
        return state

    def apart(self) -> "OuterState":
        """Return the same state, which gives way with a copy of the memory, while this one is kept.

        The next parameters take the place of the update; these are shared, and remain as they are.
        """
        memory_M = self.allocate(self.memory_M.numel(), self.memory_M.dtype).copy_(self.memory_M)
        state = OuterState(
            layout=self.layout,
            position=self.position,
            params_N=self.params_N,
            memory_M=memory_M,
            allocate=self.allocate,
        )
        state.give_way(params=False)
        return state

    @property
    def snapshot_bytes(self) -> int:
        """Return the length of the snapshot in bytes."""
        return snapshot_bytes(self.layout, self.memory_M.numel(), self.memory_M.dtype)

    @property
    def num_leaves(self) -> int:
        """Return the number of leaves of the snapshot."""
        return -(-self.snapshot_bytes // LEAF_BYTES)

    def read_leaf(self, index: int) -> bytes:
        """Return a copy of the bytes of one leaf of the snapshot.

        Raises:
            IndexError: when there is no such leaf.
        """
        if not 0 <= index < self.num_leaves:
            raise IndexError(f"expected a leaf in [0, {self.num_leaves}), got {index}")
        return bytes(self.leaf(index))

    def leaves(self) -> list[bytes]:
        """Return the digest of each leaf; hashed once, about 0.2 s a gigabyte, without the GIL.

        Whoever asks meanwhile waits.

        Raises:
            StateGone: the next state has taken its place, and it was not hashed before.
        """
        return list(self._leaves)

    def root(self) -> bytes:
        """Return the 32-byte state root; raise StateGone as `leaves`."""
        return merkle_root(self._leaves)

    def require_finite(self) -> None:
        """Refuse NaN and infinity.

        Raises:
            NotFinite: naming the vector that holds one.
        """
        for name, vector in (("params", self.params_N), ("memory", self.memory_M)):
            if not is_finite(vector):
                raise NotFinite(f"expected finite numbers, got NaN or infinity in {name}")

    @property
    def _leaves(self) -> tuple[bytes, ...]:
        with self._hashing:
            if self._digests is None:
                with self.kept():
                    self._digests = self._hashed()
            return self._digests

    def _hashed(self) -> tuple[bytes, ...]:
        leaves = range(self.num_leaves)
        runs = [leaves[at : at + LEAVES_A_RUN] for at in leaves[::LEAVES_A_RUN]]
        return tuple(itertools.chain.from_iterable(share(self._digests_of, runs)))

    def _digests_of(self, leaves: range) -> list[bytes]:
        return [leaf_digest(self.leaf(index)) for index in leaves]

    def _next(self, memory_M: Tensor) -> "OuterState":
        return OuterState(
            layout=self.layout,
            position=self.position + 1,
            params_N=self.allocate(self.layout.numel),
            memory_M=memory_M,
            allocate=self.allocate,
        )

    def leaf(self, index: int) -> bytes | memoryview:
        """Return the bytes of one leaf, without a copy if they lie in one vector."""
        start, stop = index * LEAF_BYTES, (index + 1) * LEAF_BYTES
        params, memory = _bytes(self.params_N), _bytes(self.memory_M)
        here = params[start:stop]
        if len(here) == LEAF_BYTES:
            return here
        there = memory[max(0, start - len(params)) : max(0, stop - len(params))]
        return b"".join((here, there)) if here else there  # only a leaf of both needs a copy


class Assembly:
    """Collects the leaves of a snapshot in any order, from anybody, each verified before use."""

    def __init__(
        self,
        *,
        layout: Layout,
        position: int,
        leaf_digests: Sequence[bytes],
        root: bytes,
        memory_numel: int | None = None,
        memory_dtype: torch.dtype = torch.float32,
        allocate: vectors.Allocate = vectors.empty,
    ) -> None:
        """Check the digests against the root, then make room.

        Args:
            layout: of the parameters.
            position: of the state.
            leaf_digests: `leaf_digest` of each leaf.
            root: the certified root, which they have to make up.
            memory_numel: values of the outer step's memory; by default one a parameter.
            memory_dtype: their format.
            allocate: makes the vectors of the state and of those after it.

        Raises:
            SnapshotMismatch: when they do not make up the root, or no snapshot of that length.
        """
        length = snapshot_bytes(layout, memory_numel, memory_dtype)
        expected = -(-length // LEAF_BYTES)
        if len(leaf_digests) != expected:
            raise SnapshotMismatch(f"expected {expected} leaf digests, got {len(leaf_digests)}")
        if merkle_root(leaf_digests) != root:
            raise SnapshotMismatch("expected leaf digests of the certified root, got others")
        self._digests = tuple(leaf_digests)
        self._layout = layout
        self._position = position
        self._length = length
        # Apart: an update replaces the parameters, whose memory has to be free then.
        self._params_N = allocate(layout.numel)
        numel = (length - 4 * layout.numel) // memory_dtype.itemsize
        self._memory_M = allocate(numel, memory_dtype)
        self._allocate = allocate
        self._missing = set(range(expected))

    @property
    def missing(self) -> frozenset[int]:
        """Return the indices of the leaves that are still to come."""
        return frozenset(self._missing)

    def add(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Verify a leaf, packed or not, and keep it; one that is already there is ignored.

        Raises:
            LeafRefused: when the index, length or digest is wrong. Ask another donor.
        """
        if not 0 <= index < len(self._digests):
            raise LeafRefused(f"expected a leaf in [0, {len(self._digests)}), got {index}")
        start = index * LEAF_BYTES
        length = min(LEAF_BYTES, self._length - start)
        try:
            leaf = planes.unpack(data, length)
        except CodecError as error:
            raise LeafRefused(f"leaf {index}: {error}") from None
        if leaf_digest(leaf) != self._digests[index]:
            raise LeafRefused(f"expected leaf {index} to have its digest, got other bytes")
        if index in self._missing:
            self._put(start, leaf)
            self._missing.discard(index)

    def _put(self, start: int, data: memoryview) -> None:
        """Copy bytes of the snapshot to where they belong; a leaf may hold some of both vectors."""
        params, memory = _bytes(self._params_N), _bytes(self._memory_M)
        here = max(0, min(len(data), len(params) - start))
        if here:
            params[start : start + here] = data[:here]
        if here < len(data):
            there = max(0, start - len(params))
            memory[there : there + len(data) - here] = data[here:]

    def finish(self) -> OuterState:
        """Return the state, once every leaf is there.

        Raises:
            SnapshotIncomplete: when leaves are missing.
            NotFinite: when the certified state itself holds NaN or infinity.
        """
        if self._missing:
            raise SnapshotIncomplete(
                f"expected {len(self._digests)} leaves, {len(self._missing)} are missing, "
                f"the first is {min(self._missing)}"
            )
        state = OuterState(
            layout=self._layout,
            position=self._position,
            params_N=self._params_N,
            memory_M=self._memory_M,
            allocate=self._allocate,
        )
        state.require_finite()
        state._digests = self._digests  # each leaf had its digest when it came
        return state


def snapshot_bytes(
    layout: Layout, memory_numel: int | None = None, memory_dtype: torch.dtype = torch.float32
) -> int:
    """Return the length of a snapshot in bytes; by default the memory is one value a parameter."""
    numel = layout.numel if memory_numel is None else memory_numel
    return 4 * layout.numel + memory_dtype.itemsize * numel


def leaf_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte BLAKE3 of a leaf."""
    return blake3(data).digest()


def merkle_root(leaf_digests: Sequence[bytes]) -> bytes:
    """Return the root over leaf digests, as the module's docstring defines it.

    Raises:
        SnapshotMismatch: when there is none, or one is not 32 bytes.
    """
    if not leaf_digests or any(len(digest) != DIGEST_BYTES for digest in leaf_digests):
        raise SnapshotMismatch("expected at least one digest, of 32 bytes each")
    level = list(leaf_digests)
    while len(level) > 1:
        level = [_node(level[i : i + 2]) for i in range(0, len(level), 2)]
    count = struct.pack(">Q", len(leaf_digests))
    return blake3(_ROOT + count + level[0]).digest()


def is_finite(vector_N: Tensor) -> bool:
    """Return whether a vector, fp32 or bf16, has neither NaN nor infinity."""
    if vector_N.dtype == torch.bfloat16:
        return halves.are_finite(vector_N)
    flat_N = vector_N.reshape(-1)
    # A sum of squares passes NaN and infinity on, and is 25 times as fast as isfinite().all().
    if math.isfinite(float(torch.dot(flat_N, flat_N))):
        return True
    least, most = torch.aminmax(vector_N)  # finite values may have squares that overflow
    return math.isfinite(float(least)) and math.isfinite(float(most))


def _node(pair: list[bytes]) -> bytes:
    return blake3(_NODE + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0]


def _bytes(vector: Tensor) -> memoryview:
    """Return a vector's values as they are in a snapshot; no copy."""
    _require_little_endian()
    if not vector.numel():
        return memoryview(b"")
    return vector.view(torch.uint8).numpy().data.cast("B")  # NumPy has no bf16


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise StateError("expected a little-endian machine: snapshots are little-endian")
