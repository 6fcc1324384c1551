"""Rules that hold in every run, whatever happens to its machines.

    Audit           of the run: entries, states, acknowledgements, admissions, bounds
    WorkAudit       of one trainer: each step counts once
    AuditedResidual of one fragment's error feedback: what the codec took comes back once

An audit computes what it expects from what it sees, by other formulas than the code that it checks.
A `Broken` names the rule and the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.compression.base import Codec
from atoll.optim.log.entry import Entry
from atoll.optim.log.live_replica import Applied
from atoll.optim.methods.base import Method
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.updates import Update, dense
from atoll.peer.daemon.reducer import RunReducer
from atoll.peer.lab.hunt.edges import Machine
from atoll.peer.lab.hunt.mass_audits import MassAudit
from atoll.peer.lab.hunt.order_audits import OrderAudit
from atoll.peer.lab.hunt.unit_audits import UnitAudit

CLOSE = 1e-3  # sums of some hundred steps in fp32, of values around 1
Place = tuple[int, int]
"""Epoch and position."""
NOWHERE: Place = (-1, -1)


class RuleBroken(AssertionError):
    """A run has broken a rule."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Audit:
    """The rules of a run that one machine alone cannot see."""

    def __init__(
        self, run_key: bytes, method: Method, genesis: OuterState, *, units: int = 0
    ) -> None:
        """Begin a run of a method at its first state; `units` are those of a pass."""
        planned = getattr(method, "lr", 0.0), getattr(method, "momentum", 0.0)
        self.units = UnitAudit(units, self.fail)
        self.mass = MassAudit(method.scalars(0.0), genesis, self.fail)
        self.orders = OrderAudit(run_key, planned, self.fail)
        self.broken: RuleBroken | None = None
        """the first rule that was broken; the world ends with it"""
        self.num_applied = 0
        self._decided: dict[Place, bytes] = {}
        self._roots: dict[bytes, bytes] = {}
        self._acknowledged: dict[str, Place] = {}
        """By the name of a coordinator's machine."""
        self._opened: dict[int, bytes] = {}
        """By the number of the epoch."""
        self._promised: dict[str, Place] = {}
        """by incarnation"""
        self.furthest: Place = NOWHERE

    def fail(self, rule: str, text: str, *, cause: BaseException | None = None) -> None:
        """Note that a rule is broken."""
        if self.broken is None:
            self.broken = RuleBroken(rule, text)
            self.broken.__cause__ = cause

    def applied(self, machine: Machine, applied: Applied) -> None:
        """Take an entry that a replica has applied."""
        entry = applied.entry
        self.decided(machine, entry)
        # Replicas have the same states after the same chain.
        root = applied.state.root()
        if self._roots.setdefault(entry.chain, root) != root:
            self.fail("equal states", f"{machine.name} differs after {entry.epoch, entry.position}")
        self.num_applied += 1
        self.furthest = max(self.furthest, (entry.epoch, entry.position))

    def decided(self, machine: Machine, entry: Entry) -> None:
        """Take an entry that a machine holds for decided."""
        self.orders.decided(machine.name, entry)
        self.units.decided(machine.name, entry)
        place = entry.epoch, entry.position
        if self._decided.setdefault(place, entry.digest) != entry.digest:
            self.fail("one entry a position", f"{machine.name} has another at {place}")

    def opened(self, machine: Machine, epoch: int, record: bytes) -> None:
        """Take the record of the newest epoch that a machine knows."""
        if self._opened.setdefault(epoch, record) != record:
            self.fail("no epoch is signed twice", f"{machine.name} has another epoch {epoch}")

    def acknowledged(self, machine: Machine, epoch: int, position: int) -> None:
        """Take where a coordinator has told a peer that its log ends."""
        known = self._acknowledged.get(machine.name, NOWHERE)
        self._acknowledged[machine.name] = max(known, (epoch, position))

    def reopened(self, machine: Machine, epoch: int, position: int) -> None:
        """Take where a coordinator's log ends after a restart."""
        known = self._acknowledged.get(machine.name, NOWHERE)
        if (epoch, position) < known:
            self.fail(
                "what is acknowledged stays",
                f"{machine.name} has restarted at {epoch, position}, and had told peers that it "
                f"holds {known}",
            )

    def restored(self, machine: Machine) -> None:
        """Note that a coordinator begins with a copy, which lacks what came after it."""
        self._acknowledged.pop(machine.name, None)

    @property
    def num_epochs(self) -> int:
        """Return in how many epochs entries were decided."""
        return len({place[:-1] for place in self._decided})

    def promised(self, incarnation: str, place: Place) -> None:
        """Take a place at which a keeper is about to vote."""
        self._promised[incarnation] = max(place, self._promised.get(incarnation, NOWHERE))

    def remembered(self, machine: Machine, incarnation: str, left: Place) -> None:
        """Take what a keeper remembers after a restart; a new incarnation has never voted."""
        furthest = self._promised.get(incarnation, NOWHERE)
        if left < furthest:
            self.fail(
                "promises are kept",
                f"{machine.name} has voted at {tuple(furthest)} and remembers {tuple(left)}",
            )


class WorkAudit:
    """The sum of what one trainer has learned, and of what entries have counted of it.

    What it has learned and no entry has counted is the distance of its parameters from those that
    all share. A reset drops it, which is no loss of anybody else's work.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.windows = 0
        self._learned_N = self._counted_N = torch.zeros(0)
        self._handed_in: dict[int, Tensor] = {}
        self._kept = 0
        """decisions about what was handed in that the worker had not taken when it was saved"""
        self._decided = self._closed = 0
        """since the last start or reset: decisions that came, and what the worker had closed"""
        self._worker: Worker | None = None
        self._layout: Layout | None = None

    def watch(self, reducer: RunReducer, model: nn.Module) -> None:
        """See what is handed in and what is decided."""
        self._layout = layout = Layout.of(model)
        self._learned_N, self._counted_N = torch.zeros(layout.numel), torch.zeros(layout.numel)
        start, submit = reducer.start, reducer.submit

        def watched_start(
            layout: Layout, params_N: Tensor, settle: Callable[[Commit], None]
        ) -> Tensor:
            return start(layout, params_N, lambda commit: self._settled(commit, settle))

        def watched_submit(contribution: Contribution) -> None:
            self._handed_in[contribution.fragment] = contribution.delta_N.clone()
            self.windows += 1
            submit(contribution)

        reducer.start = watched_start  # type: ignore[method-assign]
        reducer.submit = watched_submit  # type: ignore[method-assign]

    def begin(self, worker: Worker) -> None:
        """Begin with a worker that has just started."""
        self._worker = worker
        self._closed = _num_closed(worker)

    def step(self, worker: Worker, step: Callable[[], None]) -> None:
        """Do a step, whose inner half is what was learned."""
        before_N = self._local(worker)
        worker.inner.step()
        self._learned_N += self._local(worker) - before_N
        step()
        self._check(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, to be saved with the worker's."""
        return {
            "learned": self._learned_N.clone(),
            "counted": self._counted_N.clone(),
            "handed_in": [[f, d] for f, d in self._handed_in.items()],
            "kept": self._num_kept(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, closed: int) -> None:
        """Continue with a saved state, before the worker does, which had closed so many."""
        self._learned_N, self._counted_N = state["learned"].clone(), state["counted"].clone()
        self._handed_in = {int(f): d.clone() for f, d in state["handed_in"]}
        self._kept, self._decided, self._closed = int(state["kept"]), 0, closed

    def resumed(self, worker: Worker) -> None:
        """Check a worker that has loaded its state."""
        self._check(worker)

    def _num_kept(self) -> int:
        """Return how many decisions came that the worker has not taken yet."""
        if self._worker is None:
            return 0
        return self._kept + self._decided - (_num_closed(self._worker) - self._closed)

    def fail_residual(self, wrong: float, fragment: int) -> None:
        """Note that a residual is not what it ought to be."""
        self._machine.world.audit.fail(
            "the codec's loss comes back once",
            f"the residual of {self._machine.name}, fragment {fragment}, is {wrong:.4f} off",
        )

    def _local(self, worker: Worker) -> Tensor:
        assert self._layout is not None
        return self._layout.flatten(worker.model, None).clone()

    def _settled(self, commit: Commit, settle: Callable[[Commit], None]) -> None:
        settle(commit)
        worker = self._worker
        if commit.reset:
            self._kept = self._decided = 0
            self._closed = _num_closed(worker) if worker is not None else 0
            self._learned_N.zero_()
            self._counted_N.zero_()
            self._handed_in.clear()
        elif commit.settles and worker is not None:
            self._decided += 1
            delta_F = self._handed_in.pop(commit.fragment, None)
            if delta_F is not None and commit.included is not None:
                fragment = worker.fragments[commit.fragment]
                counted_N = torch.zeros_like(self._counted_N)
                fragment.put_(counted_N, delta_F * fragment.mask(commit.included))
                self._counted_N -= counted_N  # a delta is synced minus local

    def _check(self, worker: Worker) -> None:
        stats = worker.statistics()
        if worker.next_position != stats.position or self._num_kept() or stats.discarded:
            return  # something is under way, whose share of local is not decided
        open_N = self._local(worker) - worker.synced_N
        wrong = float((open_N - (self._learned_N - self._counted_N)).abs().max())
        if wrong > CLOSE:
            self._machine.world.audit.fail(
                "work counts once",
                f"the parameters of {self._machine.name} are {wrong:.4f} from what it has learned "
                f"and no entry has counted, at position {worker.statistics().position}",
            )


def _num_closed(worker: Worker) -> int:
    stats = worker.statistics()
    return stats.included + stats.left_out


class AuditedResidual:
    """A `Residual` that also keeps what the residual ought to be.

    An inclusion of weight w changes it by w (delta - d), where d is what the frames decode to; an
    owner's loss is added once.
    """

    def __init__(self, inner: Feedback, audit: WorkAudit, fragment: int) -> None:
        self._inner = inner
        self._audit = audit
        self._fragment = fragment
        self._expected_N = inner.mass_N.clone()
        self._delta_N = torch.zeros(0)

    def offer(self, delta: Any, weight: float) -> Offer:  # noqa: ANN401
        """Encode a contribution."""
        self._delta_N = delta.clone() if isinstance(delta, Tensor) else delta()
        return self._inner.offer(delta, weight)

    def encode_on(self, device: torch.device) -> None:
        """Encode on a device."""
        self._inner.encode_on(device)

    def use_codec(self, codec: Codec) -> None:
        """Encode in another codec."""
        self._inner.use_codec(codec)

    def settle(
        self, offer: Offer, included: Tensor, *, weight: float, update_F: Update | None = None
    ) -> None:
        """Take what was included."""
        self._inner.settle(offer, included, weight=weight, update_F=update_F)
        if self._inner.beta and offer.weight:
            codec, start = self._inner.codec, 0
            for dims, frame, is_in in zip(
                self._inner.pieces, offer.frames, included.tolist(), strict=True
            ):
                numel = int(torch.Size(dims).numel())
                if is_in:
                    sent = codec.decode(frame, dims).flatten()
                    cut = slice(start, start + numel)
                    self._expected_N[cut] += weight * (self._delta_N[cut] - sent)
                start += numel
        self._check()

    def owner_credit(self, part: slice, lost: Update) -> None:
        """Take the loss of an owner's encoding."""
        self._inner.owner_credit(part, lost)
        if self._inner.beta:
            self._expected_N[part] += dense(lost)
        self._check()

    def reset(self) -> None:
        """Forget the residual."""
        self._inner.reset()
        self._expected_N.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the residual."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a residual."""
        self._inner.load_state_dict(state)
        self._expected_N = self._inner.mass_N.clone()

    def _check(self) -> None:
        if not self._inner.beta:
            return
        wrong = float((self._inner.mass_N - self._expected_N).abs().max())
        scale = 1.0 + float(self._expected_N.abs().max())
        if wrong > CLOSE * scale:
            self._audit.fail_residual(wrong, self._fragment)
