"""Memory and disk that a run needs on a peer's machine and on the coordinator's.

Counted are the model-sized vectors, files and bodies that exist at once; scripts/bench_sizes.py
measures what processes take (docs/benchmarks/sizes.md). Not counted are activations and what a
process takes whatever the model, about 500 MB.

# N parameters, S positions between two snapshots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inner import muon_groups
from atoll.optim.log.store import KEPT_SNAPSHOTS
from atoll.optim.methods.base import Method
from atoll.optim.state.layout import Layout

LEDGER_SNAPSHOTS = 2  # that a coordinator keeps beside the first state, which stays everywhere
SAVED_COPIES = 2  # of what a peer saves in memory: the copy, and its bytes as they are written
BODIES = 3  # of a window in memory: own frames, those that came, and the entry's body
FP32 = 4  # bytes of a value


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Bytes that a run needs of its machines at the peak."""

    peer_memory: int
    """Host memory of a peer that trains on its processor."""
    inner_memory: int
    """Model, gradients and inner state in it: on the GPU of a peer that has one."""
    coordinator_memory: int
    peer_disk: int
    """Kept by a peer."""
    peer_disk_free: int
    """Needed beside that: files are written whole before they replace the old."""
    coordinator_disk: int
    """Kept by the coordinator, with all its checkpoints but without updates."""
    coordinator_disk_free: int
    coordinator_disk_a_round: int
    """Added by each round: the coordinator keeps every update."""


def resources(
    spec: RunSpec, method: Method, model: nn.Module, *, peers: int, bodies: Sequence[int]
) -> Resources:
    """Return what a run needs.

    Args:
        spec: the run's, of which intervals and limits count.
        method: the method with its codec, perhaps another one than the run's.
        model: it may be on the meta device.
        peers: members of a round.
        bodies: bytes of the update of each fragment.
    """
    layout, every = Layout.of(model), spec.round.snapshot_every
    state = state_bytes(method, layout)
    # A peer keeps the updates since the oldest of its snapshots, whatever its budget says.
    needed = KEPT_SNAPSHOTS * every * sum(bodies) // len(bodies)
    checkpoints = max(1, spec.coordinator.keep_checkpoints)
    return Resources(
        peer_memory=memory_bytes(method, model, peers=peers, bodies=bodies),
        inner_memory=inner_bytes(method, model),
        coordinator_memory=2 * state + FP32 * layout.numel + max(bodies),
        peer_disk=(1 + KEPT_SNAPSHOTS) * state
        + saved_bytes(method, model)
        + max(needed, 1_000_000 * spec.round.log_mb),
        peer_disk_free=state + saved_bytes(method, model),
        coordinator_disk=(1 + LEDGER_SNAPSHOTS + checkpoints) * state,
        coordinator_disk_free=2 * state,
        coordinator_disk_a_round=sum(bodies),
    )


def memory_bytes(method: Method, model: nn.Module, *, peers: int, bodies: Sequence[int]) -> int:
    """Return the bytes of a peer that applies a round's result while its state is saved.

    That is the peak. Beside the inner state there are a second model that validates, the common
    state twice (an update is applied in new buffers), the update, the residual and its change, and
    what a method keeps of a window. A worker that does not wait keeps what it handed in.
    """
    layout = Layout.of(model)
    vectors = 2  # the second model, and the update
    vectors += 2 if method.residual > 0 else 0
    vectors += 1 if method.rank else 0  # the input of the factors
    vectors += 1 if method.hidden_steps(1) or method.reduction == "pairs" else 0
    vectors += method.window_vectors
    frames = (peers if method.reduction == "gather" else BODIES) * sum(bodies)
    return (
        inner_bytes(method, model)
        + FP32 * layout.numel * vectors
        + 2 * state_bytes(method, layout)
        + SAVED_COPIES * saved_bytes(method, model)
        + frames
    )


def inner_bytes(method: Method, model: nn.Module) -> int:
    """Return the bytes of parameters, gradients and inner optimizer."""
    return FP32 * (2 * Layout.of(model).numel + _moments(method, model))


def saved_bytes(method: Method, model: nn.Module) -> int:
    """Return the bytes that a peer saves: parameters, inner optimizer, synced and residual."""
    layout = Layout.of(model)
    vectors = 2 + (1 if method.residual > 0 else 0)
    return FP32 * (vectors * layout.numel + _moments(method, model))


def state_bytes(method: Method, layout: Layout) -> int:
    """Return the bytes of the common state: parameters, and the outer step's memory."""
    return FP32 * (layout.numel + method.memory_numel(layout))


def _moments(method: Method, model: nn.Module) -> int:
    if method.inner == "muon":
        groups = muon_groups(model, weight_decay=0.0)
        return sum(
            (1 if group["kind"] == "muon" else 2) * param.numel()
            for group in groups
            for param in group["params"]
        )
    return {"adamw": 2, "lion": 1, "sgd": 0}[method.inner] * Layout.of(model).numel
