"""Results of a demo: numbers as JSON, a page, a plot, and the check that all replicas are equal.

The check uses only what the processes wrote: every peer's hash chain against that of the
coordinator's log, and every peer's final digest of parameters and outer state against that of the
checkpoint. A pipeline is checked stage by stage, each with its own log. A gossip run has neither,
because each peer has its own model; the page then reports their distance from the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from atoll.coordinator.checkpoints import Checkpoint, load_checkpoint
from atoll.coordinator.ledger import contributors
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import FlowStatus, PeerStatus
from atoll.coordinator.run.text import loss_text
from atoll.dht.identity import short
from atoll.optim.log.entry import Entry
from atoll.optim.log.module import WHOLE, log_folder
from atoll.optim.log.store import LogStore
from atoll.optim.state.layout import Layout
from atoll.peer.lab.baseline import BaselineResult
from atoll.peer.lab.demo import DemoRun, module_of
from atoll.peer.lab.plotting import LossPlot, draw_loss
from atoll.peer.paths import PeerPaths
from atoll.peer.training import saved
from atoll.peer.training.devices import Device
from atoll.peer.training.learner import Evaluator
from atoll.peer.training.opening import (
    build_model,
    open_corpus,
    separate_documents,
    slices_of,
    validation,
)
from atoll.peer.training.permission import Allowed
from atoll.peer.training.stages import StageModel

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Flowed:
    """The passes through the peers of a pipeline, across restarts, as they last reported them."""

    counted: int
    """Gradients of microbatches that were added up: one a stage for each microbatch."""
    omitted: int
    """Microbatches that a peer gave up, but for those that it left behind when it ended."""
    resends: int
    """Outputs that were sent again, to replace a peer that was lost or silent."""
    double_counts: int
    """Microbatches that counted at two peers of one stage."""

    @classmethod
    def of(cls, flows: Iterable[FlowStatus]) -> Flowed:
        """Return the sum."""
        found = list(flows)
        return cls(
            counted=sum(flow.counted for flow in found),
            omitted=sum(flow.num_omitted for flow in found),
            resends=sum(flow.resends for flow in found),
            double_counts=sum(flow.double_counts for flow in found),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a demo. Losses in nats per token, sizes in bytes, times in seconds."""

    rounds: int
    peers: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    loss_baseline: float | None
    valid_loss: float
    valid_loss_baseline: float | None
    valid_loss_alone: float | None
    bytes_sent_per_peer: int
    bytes_received_per_peer: int
    ddp_bytes_per_peer: int | None
    """None for a pipeline, whose peers could not train data parallel."""
    traffic_ratio: float | None
    utilisation: float
    seconds_to_first_round: float
    seconds: float
    chains_equal: bool | None
    """None for gossip."""
    states_equal: bool | None
    distance_to_mean: float | None
    """Mean distance of the peers' parameters from their mean, relative to its norm; gossip only."""
    recovered_peers: int
    phases: dict[str, float]
    checkpoint: str
    """Of a pipeline, the folder of the stages' checkpoints."""
    plot: str
    stages: int = 1
    flow: Flowed | None = None
    """In a pipeline."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Baselines on the same text in the same number of steps."""

    baseline: BaselineResult | None = None
    alone: BaselineResult | None = None


def summarise(run: DemoRun, spec: RunSpec, compared: Compared, plot: Path) -> Summary:
    """Summarise a finished demo from its files and write the plot."""
    checkpoints = {name: load_checkpoint(path) for name, path in run.checkpoints.items()}
    gossip, is_staged = spec.method().reduction == "pairs", len(checkpoints) > 1
    logs = {} if gossip else {m: read_log(run, c, module=m) for m, c in checkpoints.items()}
    last = spec.modules[-1]  # the loss is known there
    rounds = reported_rounds(run) if gossip else logged_rounds(logs[last])
    sent, received = per_peer_bytes(run)
    ddp = None
    if not is_staged:
        ddp = ddp_bytes(checkpoints[last].layout, len(run.peers), len(rounds), spec)
    valid_loss = held_out_loss(spec, *checkpoints.values())
    draw_loss(loss_plot(run, spec, rounds, compared, valid_loss), plot)
    base = compared.baseline
    losses = [row.loss for row in rounds if row.loss is not None]
    return Summary(
        rounds=len(rounds),
        peers=len(run.peers),
        tokens=sum(row.tokens for row in rounds),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        loss_baseline=base.loss if base else None,
        valid_loss=valid_loss,
        valid_loss_baseline=base.valid_loss if base else None,
        valid_loss_alone=compared.alone.valid_loss if compared.alone else None,
        bytes_sent_per_peer=sent,
        bytes_received_per_peer=received,
        ddp_bytes_per_peer=ddp,
        traffic_ratio=None if ddp is None else ddp / max(sent, 1),
        utilisation=run.status.utilisation or mean_utilisation(run.status.peers),
        seconds_to_first_round=run.seconds_to_first_round,
        seconds=run.seconds,
        chains_equal=all(chains_equal(run, logs[m], module=m) for m in logs) if logs else None,
        states_equal=None
        if gossip
        else all(states_equal(run, checkpoints[m], module=m) for m in checkpoints),
        distance_to_mean=distance_to_mean(run, spec) if gossip else None,
        recovered_peers=recovered_peers(run, None if gossip else logs.get(killed_in(run), [])),
        phases=mean_phases(run.status.peers),
        checkpoint=str(run.checkpoint.parent.parent if is_staged else run.checkpoint),
        plot=str(plot),
        stages=spec.topology.num_stages,
        flow=Flowed.of(f for peer in run.peers for f in peer.flows.values()) if is_staged else None,
    )


@dataclass(frozen=True, kw_only=True)
class RoundLosses:
    """Losses and tokens of one round, for the plot."""

    position: int
    """Rounds completed, including this one."""
    loss: float | None
    tokens: int
    losses: Mapping[str, float]
    """Training loss by PeerID; empty for gossip."""


def logged_rounds(entries: Sequence[Entry]) -> list[RoundLosses]:
    """Return the rounds of a log, with tokens counted once although every fragment lists them."""
    num_fragments = 1 + max((entry.fragment for entry in entries), default=0)
    return [
        RoundLosses(
            position=entry.position + 1,
            loss=entry.loss,
            tokens=sum(member.tokens for member in contributors(entry)) // num_fragments,
            losses={m.peer_id: m.loss for m in entry.members if m.loss is not None},
        )
        for entry in entries
    ]


def reported_rounds(run: DemoRun) -> list[RoundLosses]:
    """Return the rounds of a gossip run, as its peers reported them."""
    return [
        RoundLosses(position=row.position, loss=row.loss, tokens=row.tokens, losses={})
        for row in run.status.history
    ]


def read_log(run: DemoRun, checkpoint: Checkpoint, *, module: str = WHOLE) -> list[Entry]:
    """Return all entries of the coordinator's log of a module, of which there is a checkpoint."""
    store = LogStore(
        run.coordinator_dir / log_folder(module),
        run_id=checkpoint.run_id,
        genesis_chain=checkpoint.chain,
    )
    try:
        records = store.headers(0, store.head.position)
    finally:
        store.close()
    return [Entry.decode(record.entry) for record in records]


def distance_to_mean(run: DemoRun, spec: RunSpec) -> float:
    """Return the peers' mean distance from their mean, from the states they saved at the end."""
    paths = [PeerPaths(root=peer.folder).trainer() for peer in run.peers]
    trees = [saved.load(path, kind="trainer", run=spec.digest()) for path in paths]
    params_PN = torch.stack([tree["worker"]["synced_N"] for tree in trees])
    mean_N = params_PN.mean(0)
    return float((params_PN - mean_N).norm(dim=1).mean() / mean_N.norm())


def per_peer_bytes(run: DemoRun) -> tuple[int, int]:
    """Return the bytes on the wire, sent and received, averaged over the peers."""
    sent, received = zip(*(peer.wire_bytes for peer in run.peers), strict=True)
    return sum(sent) // len(run.peers), sum(received) // len(run.peers)


def ddp_bytes(layout: Layout, peers: int, rounds: int, spec: RunSpec) -> int:
    """Return the bytes that a peer of data-parallel training would send in the same steps.

    A ring all-reduce of fp32 gradients sends 2 (P - 1) / P of them per step and peer.
    """
    steps = spec.timetable(len(spec.method().fragments(layout))).steps_until(rounds)
    return 2 * (peers - 1) * layout.numel * FP32_BYTES * steps // peers


def chains_equal(run: DemoRun, entries: Sequence[Entry], *, module: str = WHOLE) -> bool:
    """Return whether every peer of a module ended with the hash chain of the coordinator's log."""
    last = entries[-1].chain.hex()
    return _all_of(run, module, lambda peer: peer.chain == last)


def states_equal(run: DemoRun, checkpoint: Checkpoint, *, module: str = WHOLE) -> bool:
    """Return whether the state digest of every peer of a module equals that of the checkpoint."""
    expected = (checkpoint.position, checkpoint.state.root().hex())
    return _all_of(run, module, lambda peer: (peer.state_position, peer.state_digest) == expected)


def _all_of(run: DemoRun, module: str, holds: Callable[[PeerStatus], bool]) -> bool:
    """Return whether all peers are known, and something holds of each of a module."""
    found = [holds(peer) for peer in run.status.peers if peer.module == module]
    return len(run.status.peers) == len(run.peers) and bool(found) and all(found)


def recovered_peers(run: DemoRun, entries: Sequence[Entry] | None) -> int:
    """Return how many killed peers recovered their state and took part in a round again.

    Args:
        run: the finished run.
        entries: of the log that the killed peer follows; None if there is no log.
    """
    if run.kill is None:
        return 0
    killed = next(peer for peer in run.peers if peer.name == run.kill.peer)
    shown = next(peer for peer in run.status.peers if peer.name == killed.name)
    again = bool(shown.partner) if entries is None else is_member(shown, entries)
    return int(shown.recoveries > 0 and again)


def killed_in(run: DemoRun) -> str:
    """Return the module of the peer that was killed; that of a dense run if none was."""
    return module_of(run.status, run.kill.peer) if run.kill is not None else WHOLE


def is_member(peer: PeerStatus, entries: Sequence[Entry]) -> bool:
    """Return whether a peer was a complete member of a round since its last start."""
    return any(
        m.peer_id == peer.peer_id and m.incarnation == peer.incarnation
        for e in entries
        for m in e.complete_members()
    )


def held_out_loss(spec: RunSpec, *checkpoints: Checkpoint) -> float:
    """Return the loss of a checkpoint, or of all stages', on the baseline's validation batches."""
    own = Allowed.everything_in(spec)  # the demo's own
    corpus = open_corpus(spec, own)
    vocab_size = corpus.tokenizer.vocab_size
    if len(checkpoints) > 1:
        model: nn.Module = all_stages(spec, vocab_size, own)
    else:
        model = build_model(spec, vocab_size, own)
        separate_documents(spec, model, corpus.tokenizer)
    params = {name: value for each in checkpoints for name, value in each.params.items()}
    params_N = torch.cat([params[name].reshape(-1) for name in Layout.of(model).names])
    return Evaluator(model, validation(spec, corpus), Device.choose("cpu")).loss(params_N)


def all_stages(spec: RunSpec, vocab_size: int, allowed: Allowed) -> StageModel:
    """Build the whole model of a pipeline, which no peer does."""
    known = slices_of(spec, vocab_size, allowed)
    return known.build(range(len(known)), seed=spec.run.seed)


def mean_utilisation(peers: list[PeerStatus]) -> float:
    """Return the mean utilisation of the peers."""
    return sum(peer.utilisation for peer in peers) / max(len(peers), 1)


def mean_phases(peers: list[PeerStatus]) -> dict[str, float]:
    """Return the seconds of the last round by phase, averaged over the peers."""
    reported = [peer.phases for peer in peers if peer.phases]
    names = list(reported[0]) if reported else []
    return {name: sum(p.get(name, 0.0) for p in reported) / len(reported) for name in names}


def loss_plot(
    run: DemoRun,
    spec: RunSpec,
    rounds: list[RoundLosses],
    compared: Compared,
    valid_loss: float | None,
) -> LossPlot:
    """Return the content of the plot."""
    names = {peer.peer_id: peer.name for peer in run.status.peers}
    peers: dict[str, list[tuple[float, float]]] = {}
    for row in rounds:
        for peer_id, loss in row.losses.items():
            peers.setdefault(names.get(peer_id, short(peer_id)), []).append((row.position, loss))
    # A loss that peers report with a round was measured on the state before it.
    history = run.status.history
    earlier = [(r.position - 1, r.valid_loss) for r in history if r.valid_loss is not None]
    last = [] if valid_loss is None else [(float(len(rounds)), valid_loss)]
    others = {"data parallel": compared.baseline, "one peer alone": compared.alone}
    tokens = sum(row.tokens for row in rounds)
    return LossPlot(
        title=spec.run.name,
        subtitle=f"{spec.model.preset}, {_peers(len(run.peers), spec.topology.num_stages)}, "
        f"H={spec.outer.inner_steps}, {spec.method().codec.spec}, {tokens / 1e6:.2f}M tokens",
        peers=peers,
        run=[(row.position, row.loss) for row in rounds if row.loss is not None],
        valid=[*earlier, *last],
        compared={
            name: [(p.position, p.valid_loss) for p in result.history if p.valid_loss is not None]
            for name, result in others.items()
            if result is not None
        },
        marks={f"{run.kill.peer} killed": run.kill.position + 1} if run.kill else {},
    )


def render(summary: Summary, run: DemoRun) -> None:
    """Print the results as a table."""
    console = Console(highlight=False)
    table = Table(title="Results", title_justify="left", box=None, show_header=False)
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")  # shows whole paths
    for name, value in rows(summary, run):
        table.add_row(name, value)
    console.print()
    console.print(table)
    command = f'atoll sample {summary.checkpoint} --prompt "def "'
    console.print(f"\nGenerate text:  {command}", soft_wrap=True)  # whole, for copying


def rows(summary: Summary, run: DemoRun) -> list[tuple[str, str]]:
    """Return the rows of the table: name and text."""
    found = [
        (
            "trained",
            f"{summary.tokens / 1e6:.2f}M tokens in {summary.rounds} rounds by "
            f"{_peers(summary.peers, summary.stages)}, {summary.seconds:.0f} s",
        ),
        (
            "training loss",
            f"{_loss(summary.loss_first)} -> {_loss(summary.loss_last)} nats per byte",
        ),
        ("held-out loss", _held_out(summary)),
        (
            "sent per peer",
            f"{_megabytes(summary.bytes_sent_per_peer)}, received "
            f"{_megabytes(summary.bytes_received_per_peer)} (counted on the wire)",
        ),
        *_compared_traffic(summary),
        *([("flow", _flow(summary.flow))] if summary.flow is not None else []),
        ("utilisation", f"{summary.utilisation:.1%} of the time spent training"),
        ("first round", f"{summary.seconds_to_first_round:.1f} s after the peers' start"),
        ("last round", ", ".join(f"{name} {s:.2f} s" for name, s in summary.phases.items())),
        ("replicas", _verdict(summary)),
    ]
    if run.kill is not None:
        found.append(("killed", _killed(summary, run)))
    return [*found, ("checkpoint", summary.checkpoint), ("picture", summary.plot)]


def _loss(value: float | None) -> str:
    return "unknown" if value is None else loss_text(value)


def _peers(peers: int, stages: int) -> str:
    return f"{peers} peers" + (f" in {stages} stages" if stages > 1 else "")


def _compared_traffic(summary: Summary) -> list[tuple[str, str]]:
    if summary.ddp_bytes_per_peer is None or summary.traffic_ratio is None:
        return []
    sent = _megabytes(summary.ddp_bytes_per_peer)
    return [("data parallel", f"would send {sent}, {summary.traffic_ratio:.0f} times as much")]


def _flow(flow: Flowed) -> str:
    return (
        f"{flow.counted:,} gradients of microbatches counted, {flow.omitted:,} omitted, "
        f"{flow.resends:,} sent again, {flow.double_counts:,} counted at two peers of a stage"
    )


def _held_out(summary: Summary) -> str:
    text = loss_text(summary.valid_loss)
    if summary.valid_loss_baseline is not None:
        behind = summary.valid_loss / summary.valid_loss_baseline - 1
        text += f"; data parallel {loss_text(summary.valid_loss_baseline)} ({behind:+.1%})"
    if summary.valid_loss_alone is not None:
        text += f"; one peer alone {loss_text(summary.valid_loss_alone)}"
    return text


def _verdict(summary: Summary) -> str:
    if summary.distance_to_mean is not None:
        return f"one model per peer (gossip), {summary.distance_to_mean:.2%} from their mean"
    if summary.chains_equal and summary.states_equal and summary.stages > 1:
        return "bit-identical in each stage: equal hash chains and equal digests of the state"
    if summary.chains_equal and summary.states_equal:
        return "bit-identical: equal hash chains and equal digests of the state"
    return f"NOT EQUAL: chains {summary.chains_equal}, states {summary.states_equal}"


def _killed(summary: Summary, run: DemoRun) -> str:
    if run.kill is None:
        return ""
    how = "recovered and rejoined" if summary.recovered_peers else "did not rejoin"
    return f"{run.kill.peer} in the middle of round {run.kill.position + 1}; {how}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
