"""The state of a run's modules: what their peers report, and which one the others wait for.

In a pipeline the last stage knows the training loss, and the first one, which draws the text, the
loss on held-out text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from atoll.coordinator.run.status import FlowStatus, ModuleStatus, PeerStatus, RoundSummary

# Of the time: stages that compute for about equally long take turns at being the busiest.
CLEARLY_BUSIER = 0.02


def with_peers(
    modules: Sequence[ModuleStatus], trainers: Iterable[PeerStatus]
) -> list[ModuleStatus]:
    """Return the standings of a run's modules with what their peers report.

    Args:
        modules: in order.
        trainers: the run's trainers online.
    """
    of_module: dict[str, list[PeerStatus]] = {module.name: [] for module in modules}
    for peer in trainers:
        if peer.module in of_module:
            of_module[peer.module].append(peer)
    return with_binding([_with_peers(module, of_module[module.name]) for module in modules])


def with_valid_losses(
    history: Sequence[RoundSummary], measured: Sequence[RoundSummary]
) -> list[RoundSummary]:
    """Return rounds of the last stage with the validation losses that the first one reports."""
    found = {row.position: row.valid_loss for row in measured}
    return [replace(row, valid_loss=found.get(row.position)) for row in history]


def with_binding(modules: Sequence[ModuleStatus]) -> list[ModuleStatus]:
    """Return the modules with those marked for which the others wait.

    Without peers a module stops the flow. Else it is the one whose peers compute for most of the
    time: all modules take the same tokens, so its peers could take the fewest more. None is marked
    if no other is clearly less busy, as at the start, when no peer has measured its time.
    """
    vacant = {m.name for m in modules if not m.peers and m.state != "finished"}
    names = vacant or _busiest(modules)
    if len(names) == len(modules):
        names = set()  # nobody is here
    return [replace(module, binds=module.name in names) for module in modules]


def _busiest(modules: Sequence[ModuleStatus]) -> set[str]:
    ordered = sorted(modules, key=lambda module: -module.utilisation)
    if len(ordered) < 2 or ordered[0].utilisation < ordered[1].utilisation + CLEARLY_BUSIER:
        return set()
    return {ordered[0].name}


def _with_peers(module: ModuleStatus, peers: Sequence[PeerStatus]) -> ModuleStatus:
    flows = [peer.flow for peer in peers if peer.flow is not None]
    trained = [peer.utilisation for peer in peers if peer.tokens_total]
    return replace(
        module,
        peers=len(peers),
        tokens_per_s=sum(peer.tokens_per_s for peer in peers),
        utilisation=sum(trained) / len(trained) if trained else 0.0,
        in_flight=sum(flow.in_flight for flow in flows),
        queued=sum(flow.queued for flow in flows),
        omitted=sum(flow.num_omitted for flow in flows),
        double_counts=sum(flow.double_counts for flow in flows),
        waits_for=_waits_for(flows),
    )


def _waits_for(flows: Sequence[FlowStatus]) -> str:
    total_s: dict[str, float] = {}
    for flow in flows:
        for reason, waited_s in flow.waited_s.items():
            total_s[reason] = total_s.get(reason, 0.0) + waited_s
    return max(total_s, key=total_s.__getitem__, default="")
