"""Memory and disk that a run needs on a peer's machine and on the coordinator's.

Counted are the model-sized vectors, files and bodies that exist at once, and the activations of
built-in models (`atoll.peer.training.activations`); scripts/bench_sizes.py compares that with what
processes take (docs/benchmarks/sizes.md).

# N parameters that are trained, S positions between two snapshots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from atoll.coordinator.run.sections import InnerSection
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.inner import muon_groups
from atoll.optim.log.store import KEPT_SNAPSHOTS
from atoll.optim.methods.base import Method
from atoll.optim.state.layout import Layout
from atoll.optim.state.vectors import SPARE
from atoll.peer.training.activations import StepPass, step_of

LEDGER_SNAPSHOTS = 2  # that a coordinator keeps beside the first state, which stays everywhere
# In memory: own frames, those of others that wait for the group, the body of the entry, and one
# before that still goes to the coordinator.
PEER_BODIES = 4
# A recovery has bodies under way or waiting for their turn: so many, or so many bytes if that is
# less. Of larger ones one comes at a time (`atoll.peer.recovery.bodies`).
BODIES_AHEAD = 6
BODIES_AHEAD_BYTES = 64 << 20
# By gossip: the window's result, what both sides decode of each other, and six within the step:
# the mean weights, the mean pseudo-gradient, both of them joined (2), and the next state (2).
MEETING_VECTORS = 1 + 2 * 2 + 6
LEDGER_BODIES = 2  # of an entry that is applied, and of the next one that comes meanwhile
FP32 = 4  # bytes of a value
# Measured with the smallest model, libraries included, which other processes may share. A peer's
# network process takes 190 MB of it, as far as it shares nothing with the trainer's.
PEER_PROCESS_BYTES = 740 * 10**6
LEDGER_PROCESS_BYTES = 400 * 10**6
# Of each further process that trains as the same peer, whose libraries are shared, and of the one
# that starts and watches them.
RANK_PROCESS_BYTES = 290 * 10**6
LAUNCHER_PROCESS_BYTES = 180 * 10**6
GPU_PROCESS_BYTES = 500 * 10**6  # of a GPU: CUDA's context, and what its libraries work in


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The sizes of a model that count."""

    layout: Layout
    """of the parameters that are trained"""
    moment_bytes: int
    """of the inner optimizer"""
    frozen: int = 0
    """parameters that are not trained, as those beneath adapters"""

    @classmethod
    def of(cls, method: Method, model: nn.Module, inner: InnerSection | None = None) -> Weights:
        """Return those of a model, maybe on the meta device; without `inner`, moments are fp32."""
        layout = Layout.of(model)
        moments = moments_of(method, layout)
        if method.inner == "muon":
            groups = muon_groups(model, weight_decay=0.0)
            of_muon = [group["params"] for group in groups if group["kind"] == "muon"]
            moments -= sum(param.numel() for params in of_muon for param in params)
        return cls(
            layout=layout,
            moment_bytes=FP32 * moments if inner is None else moment_bytes(inner, moments),
            frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        )


def moment_bytes(inner: InnerSection, moments: int) -> int:
    """Return the bytes of so many values of the inner optimizer."""
    return moments * (1 if inner.state == "8bit" else FP32)


def moments_of(method: Method, layout: Layout) -> int:
    """Return the most values that a method's inner optimizer keeps for such a model."""
    return {"adamw": 2, "muon": 2, "lion": 1, "sgd": 0}[method.inner] * layout.numel


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Bytes that a run needs of its machines at the peak."""

    peer_memory: int
    """Host memory of a peer that trains on its processor, in a round."""
    inner_memory: int
    """Models and inner state in it, and gradients where they stay: on the GPUs of a peer that has
    some."""
    step_memory: int
    """Host memory of a peer that trains on its processor, in an inner step with all sequences of a
    micro-batch."""
    recovery_memory: int
    """Host memory of a peer that trains on its processor, while it fetches the state of the run."""
    recovery_memory_on_gpu: int
    """The same of a peer whose models and inner state are on GPUs."""
    peer_state: int
    """The part of `peer_memory` that `--outer-state disk` moves to files: the common state and an
    update."""
    step_state: int
    """The same part of `step_memory`."""
    recovery_state: int
    """The least such part of `recovery_memory`, with and without GPUs."""
    gpu_memory: int
    """Memory of a GPU in the same step."""
    gpu_memory_least: int
    """The same for one sequence at a time, recomputed. Activations of other models than built-in
    ones are not counted."""
    coordinator_memory: int
    coordinator_state: int
    """The common state in it, likewise."""
    peer_disk: int
    """Kept by a peer."""
    peer_disk_free: int
    """Needed beside that: files are written whole before they replace the old."""
    coordinator_disk: int
    """Kept by the coordinator, with all its checkpoints but without updates."""
    coordinator_disk_free: int
    coordinator_disk_a_round: int
    """Added by each round: the coordinator keeps every update."""

    def host_memory(self, *, on_gpu: bool, state_on_disk: bool = False) -> int:
        """Return the host memory of a peer at the peak, of steps, rounds and recoveries.

        With the state on a disk, without the pages of its files, which the system takes back if it
        needs them.
        """
        in_round = self.peer_memory - state_on_disk * self.peer_state
        files = state_on_disk * self.recovery_state
        if on_gpu:
            return max(in_round - self.inner_memory, self.recovery_memory_on_gpu - files)
        in_step = self.step_memory - state_on_disk * self.step_state
        return max(in_round, in_step, self.recovery_memory - files)


def resources(
    spec: RunSpec,
    method: Method,
    weights: Weights,
    *,
    peers: int,
    bodies: Sequence[int],
    ranks: int = 1,
) -> Resources:
    """Return what a run needs.

    Args:
        spec: the run's, of which intervals and limits count.
        method: the method with its codec, perhaps another one than the run's.
        weights: of the model.
        peers: members of a round.
        bodies: bytes of the update of each fragment.
        ranks: processes that train as one peer, on one machine; on the processor each has a model.
    """
    every, state = spec.round.snapshot_every, state_bytes(method, weights.layout)
    mapped = mapped_bytes(method, weights.layout)
    # A peer keeps the updates since the oldest of its snapshots, whatever its budget says.
    needed = KEPT_SNAPSHOTS * every * sum(bodies) // len(bodies)
    checkpoints = max(1, spec.coordinator.keep_checkpoints)
    on_gpu = step_of(spec, weights.layout, half=True)
    of_ranks, whole = ranks_bytes(weights, ranks=ranks, bodies=bodies), inner_bytes(weights)
    waiting = waiting_bytes(method, weights)
    # A stage computes on in its rounds. Of several ranks, all still have gradients when their sum
    # is largest, as measured.
    inner = waiting if ranks == spec.topology.stages == 1 else ranks * whole
    built = FP32 * (weights.layout.numel + weights.frozen)  # in host memory, then on its device
    fetching = partial(recovery_bytes, method, weights, bodies=bodies)
    recovery, recovery_on_gpu = fetching(), fetching(model_bytes=built)
    without_state = fetching(state_on_disk=True), fetching(model_bytes=built, state_on_disk=True)
    spare, on_disk = (spare_bytes(weights.layout, parts=parts) for parts in (1, max(1, peers)))
    in_files = state + spare - on_disk
    in_round, in_step = of_ranks + inner - waiting, of_ranks + (ranks - 1) * whole
    return Resources(
        peer_memory=memory_bytes(method, weights, peers=peers, bodies=bodies) + in_round,
        inner_memory=inner,
        step_memory=in_step
        + step_bytes(spec, method, weights, peers=peers, bodies=bodies, ranks=ranks),
        recovery_memory=of_ranks + recovery + ranks * whole,
        recovery_memory_on_gpu=of_ranks + recovery_on_gpu,
        gpu_memory=whole + _activation_bytes(spec, on_gpu),
        gpu_memory_least=whole + (0 if on_gpu is None else on_gpu.least.more_bytes),
        peer_state=mapped,
        step_state=mapped if method.hidden_steps(1) else in_files,
        recovery_state=min(recovery - without_state[0], recovery_on_gpu - without_state[1]),
        coordinator_memory=ledger_bytes(method, weights.layout, peers=peers, bodies=bodies),
        coordinator_state=state + _beside(method, weights.layout),
        peer_disk=(1 + KEPT_SNAPSHOTS) * state
        + saved_bytes(method, weights)
        + max(needed, 1_000_000 * spec.round.log_mb),
        peer_disk_free=state + saved_bytes(method, weights),
        coordinator_disk=(1 + LEDGER_SNAPSHOTS + checkpoints) * state,
        coordinator_disk_free=2 * state,
        coordinator_disk_a_round=sum(bodies),
    )


def memory_bytes(method: Method, weights: Weights, *, peers: int, bodies: Sequence[int]) -> int:
    """Return the bytes of a peer that applies a round's result, which is when it takes the most.

    Beside the inner state there are the common state, the update, in whose place the next
    parameters are put, the residual, its change, and the loss of the part that the peer owns. A
    worker that does not wait keeps what it handed in, and others what their method needs. Where an
    update does not lie in the order of the parameters, or their memory is shared, they take memory
    of their own.
    """
    numel, state = weights.layout.numel, state_bytes(method, weights.layout)
    if method.reduction == "pairs":
        vector_bytes = state + FP32 * MEETING_VECTORS * numel
        return PEER_PROCESS_BYTES + waiting_bytes(method, weights) + vector_bytes
    vectors = 1.0 + method.window_vectors
    vectors += 2 + 1 / max(1, peers) if method.residual > 0 else 0
    vectors += 1 if method.rank else 0  # the input of the factors
    vectors += 1 if method.hidden_steps(1) else 0
    beside = _beside(method, weights.layout)
    frames = (peers if method.reduction == "gather" else PEER_BODIES) * sum(bodies)
    vector_bytes = round(FP32 * numel * vectors) + state + beside
    return PEER_PROCESS_BYTES + waiting_bytes(method, weights) + vector_bytes + frames


def recovery_bytes(
    method: Method,
    weights: Weights,
    *,
    bodies: Sequence[int],
    model_bytes: int = 0,
    state_on_disk: bool = False,
) -> int:
    """Return the bytes of a peer that fetches a state, beside models and inner state.

    One that has fallen behind still has the state before, and its residual. One that joins has a
    model, but no inner state yet, and applies entries whose bodies come ahead of their turn.

    Args:
        method: of the run.
        weights: of the model.
        bodies: bytes of the update of each fragment.
        model_bytes: of a model that a joining peer builds here before it moves to its device.
        state_on_disk: whether states, and the update that becomes one, lie in files.
    """
    in_memory = 0 if state_on_disk else 1
    state, vector = state_bytes(method, weights.layout), FP32 * weights.layout.numel
    behind = in_memory * 2 * state + (vector if method.residual > 0 else 0)
    longest = max(bodies)
    ahead = min(BODIES_AHEAD * longest, max(BODIES_AHEAD_BYTES, longest))
    bodies_bytes = ahead + longest  # the last is applied
    joins = in_memory * mapped_bytes(method, weights.layout) + bodies_bytes + model_bytes
    return PEER_PROCESS_BYTES + max(behind, joins)


def ranks_bytes(weights: Weights, *, ranks: int, bodies: Sequence[int]) -> int:
    """Return what several processes on one machine take more than one, beside their models.

    All but the first one get their values of the common parameters, while they still have the last
    ones, and the first one gets all frames.
    """
    if ranks == 1:
        return 0
    values, others = FP32 * weights.layout.numel, ranks - 1
    processes = LAUNCHER_PROCESS_BYTES + others * RANK_PROCESS_BYTES
    return processes + (2 * values * others + max(bodies) * others) // ranks + max(bodies)


def step_bytes(
    spec: RunSpec,
    method: Method,
    weights: Weights,
    *,
    peers: int,
    bodies: Sequence[int],
    ranks: int = 1,
) -> int:
    """Return the bytes of a peer in an inner step on its processor, rounds beside it included.

    What further ranks take beside their activations is in `ranks_bytes`.
    """
    activations = ranks * _activation_bytes(spec, step_of(spec, weights.layout, half=False))
    if method.hidden_steps(1):
        return activations + memory_bytes(method, weights, peers=peers, bodies=bodies)
    vectors = method.window_vectors + (1 if method.residual > 0 else 0)
    kept = state_bytes(method, weights.layout) + FP32 * vectors * weights.layout.numel
    kept += spare_bytes(weights.layout)
    return PEER_PROCESS_BYTES + inner_bytes(weights) + kept + activations


def spare_bytes(layout: Layout, *, parts: int = 1) -> int:
    """Return the bytes that wait for the next round in the network process.

    The old parameters, or with a state on a disk only the loss of one of so many parts.
    """
    return round(SPARE * FP32 * layout.numel) // parts


def _activation_bytes(spec: RunSpec, step: StepPass | None) -> int:
    """Return what a pass takes beside gradients; 0 if that is not known."""
    if step is None:
        return 0
    return step.bytes if spec.inner.grad_accumulation > 1 else step.more_bytes


def ledger_bytes(method: Method, layout: Layout, *, peers: int, bodies: Sequence[int]) -> int:
    """Return the bytes of a coordinator that applies an entry."""
    state = state_bytes(method, layout)
    copies = LEDGER_BODIES * (peers if method.reduction == "gather" else 1)
    # An update that moves each value apart is applied while it is decoded, in place.
    beside = 0 if _is_overwritten(method) else _beside(method, layout) + FP32 * layout.numel
    return LEDGER_PROCESS_BYTES + state + beside + copies * max(bodies)


def mapped_bytes(method: Method, layout: Layout) -> int:
    """Return the bytes of a peer's state, and of the update in whose place the next one lies."""
    return state_bytes(method, layout) + _beside(method, layout) + FP32 * layout.numel


def _beside(method: Method, layout: Layout) -> int:
    """Return the bytes of the next state, if it takes memory of its own."""
    return 0 if _is_overwritten(method) else state_bytes(method, layout)


def _is_overwritten(method: Method) -> bool:
    """Return whether the next state takes the memory of the one before."""
    return method.moves_values_apart and not method.rank


def waiting_bytes(method: Method, weights: Weights) -> int:
    """Return the bytes of `inner_bytes` in a round: a peer that waits for it drops gradients."""
    gradients = FP32 * weights.layout.numel
    return inner_bytes(weights) - (gradients if _waits(method) else 0)


def _waits(method: Method) -> bool:
    """Return whether a peer computes nothing in the rounds that end its windows."""
    return not method.every_step and not method.hidden_steps(1)


def inner_bytes(weights: Weights) -> int:
    """Return the bytes of parameters, gradients and inner optimizer, and of frozen parameters."""
    return FP32 * (2 * weights.layout.numel + weights.frozen) + weights.moment_bytes


def saved_bytes(method: Method, weights: Weights) -> int:
    """Return the bytes that a peer saves in a window: drift, inner optimizer and residual.

    At a window's end there is mostly no drift; synced is what the log gives.
    """
    vectors = 1 + method.window_vectors + (1 if method.residual > 0 else 0)
    return FP32 * vectors * weights.layout.numel + weights.moment_bytes


def state_bytes(method: Method, layout: Layout) -> int:
    """Return the bytes of the common state: parameters, and the outer step's memory."""
    return FP32 * layout.numel + method.memory_dtype.itemsize * method.memory_numel(layout)
