"""A run that looks like one, at any moment of its life, without clock or network."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from atoll.coordinator.module_status import with_peers
from atoll.coordinator.run.status import (
    Event,
    FlowStatus,
    ModuleStatus,
    PeerStatus,
    RoundSummary,
    RunStatus,
)

START = 1_790_000_000.0
ROUND_S = 18.0
NAMES = ("basalt", "coral", "drift", "ebb", "fathom", "gyre", "harbour", "islet", "jetty", "kelp")


def peer_id(i: int) -> str:
    return "12D3KooW" + "".join(random.Random(i).choices("ABCDEFGHJKLMNPQRSTUVWXYZabcdefgh", k=44))


def make_peer(i: int, *, position: int, gone: bool = False) -> PeerStatus:
    rng = random.Random(i * 1009 + position)
    wait, send, reduce = rng.uniform(0.1, 0.9), rng.uniform(0.5, 0.9), rng.uniform(0.2, 0.4)
    phases = {"wait": wait, "encode": 0.11, "send": send, "reduce": reduce, "apply": 0.06}
    name = NAMES[i % len(NAMES)] + (f"-{i // len(NAMES)}" if i >= len(NAMES) else "")
    return PeerStatus(
        peer_id=peer_id(i),
        name=name,
        state="gone" if gone else ("syncing" if i == 1 else "training"),
        phase="send" if i == 1 else "compute",
        position=position,
        chain=f"{position:08x}" * 8,
        tokens_per_s=0.0 if gone else 11_800 + 900 * i + rng.uniform(-300, 300),
        tokens_total=position * 60_000,
        loss=loss_at(position) + rng.uniform(-0.05, 0.05),
        valid_loss=loss_at(position) + 0.06,
        step=30 if i == 1 else (7 * i + 5) % 30,
        inner_steps=30,
        wire_bytes_sent=position * 1_060_000 + i * 12_345,
        wire_bytes_received=position * 1_090_000 + i * 23_456,
        uplink_mbit_s=(20.0, 48.0, 103.0, 940.0)[i % 4],
        downlink_mbit_s=(50.0, 196.0, 412.0, 940.0)[i % 4],
        uplink_use=(0.97, 0.81, 0.42, 0.04)[i % 4],
        downlink_use=(0.4, 0.22, 0.11, 0.05)[i % 4],
        utilisation=rng.uniform(0.93, 0.985),
        last_seen_s=312.0 if gone else rng.uniform(0.2, 4.0),
        phases=phases,
        device=("cuda NVIDIA H100", "cpu", "mps Apple M3", "cuda RTX 4090")[i % 4],
        version="0.1.0",
    )


def loss_at(position: int) -> float:
    return 1.35 + 4.2 * math.exp(-position / 9)


def make_round(position: int, *, num_peers: int, left_out: list[str]) -> RoundSummary:
    rng = random.Random(position)
    seconds = {
        "wait": rng.uniform(0.2, 1.1) + (2.4 if left_out else 0),
        "encode": rng.uniform(0.1, 0.13),
        "send": rng.uniform(0.5, 0.9),
        "reduce": rng.uniform(0.2, 0.4),
        "apply": 0.06,
    }
    return RoundSummary(
        position=position,
        at=START + ROUND_S * position + rng.uniform(-1, 1),
        loss=loss_at(position) + rng.gauss(0, 0.04),
        valid_loss=loss_at(position) + 0.06 if position % 5 == 0 else None,
        tokens=num_peers * 61_440,
        members=num_peers - len(left_out),
        left_out=left_out,
        seconds=seconds,
        wire_bytes=(num_peers - len(left_out)) * 1_060_000,
        chain=f"{position * 2654435761 % 2**32:08x}" * 8,
    )


def make_events(position: int, num_peers: int) -> list[Event]:
    found = [Event(at=START, source="coordinator", text="the run is open: waiting for 2 peers")]
    for i in range(num_peers):
        found.append(Event(at=START + 2 + i, source=peer_id(i), text="joined: state verified"))
    for p in range(1, position + 1):
        at = START + ROUND_S * p
        if p % 13 == 0:
            text = "owner went silent in round " + str(p) + "; 2 parts re-reduced in 0.8 s"
            found.append(Event(at=at, level="warning", source=peer_id(0), text=text))
        if p % 21 == 0:
            text = "refused an update from a peer: block 12 holds NaN"
            found.append(Event(at=at, level="error", source=peer_id(2), text=text))
        if p % 8 == 0:
            text = f"snapshot of position {p} stored"
            found.append(Event(at=at, source="coordinator", text=text))
    return found[-256:]


def make_status(
    position: int = 37,
    *,
    num_peers: int = 5,
    num_gone: int = 1,
    rounds_total: int = 120,
    state: str = "training",
) -> RunStatus:
    """The run after `position` rounds; the last `num_gone` peers are gone."""
    history = [
        make_round(p, num_peers=num_peers, left_out=[peer_id(num_peers - 1)] if p % 13 == 0 else [])
        for p in range(max(1, position - 511), position + 1)
    ]
    peers = [
        make_peer(i, position=position, gone=i >= num_peers - num_gone) for i in range(num_peers)
    ]
    return RunStatus(
        run_name="python-1m",
        run_id="ab" * 32,
        state=state,  # type: ignore[arg-type]
        position=position,
        rounds_total=rounds_total,
        min_peers=2,
        chain="9f3ac1d0" * 8,
        started_at=START,
        now=START + ROUND_S * (position + 0.4),
        tokens_total=position * num_peers * 61_440,
        tokens_per_s=sum(peer.tokens_per_s for peer in peers),
        loss=loss_at(position) if position else None,
        valid_loss=loss_at(position) + 0.06 if position else None,
        utilisation=0.964,
        peers=peers,
        history=history,
        events=make_events(position, num_peers),
        codec="int8",
        method="diloco",
        inner_steps=30,
        params=1_048_576,
    )


def make_staged_status(
    position: int = 37, *, stages: int = 3, peers_a_stage: int = 2, state: str = "training"
) -> RunStatus:
    """A pipeline after `position` rounds; the second stage binds, and its first peer omitted."""
    plain = make_status(position, num_peers=stages * peers_a_stage, num_gone=0, state=state)
    peers = [_of_stage(peer, i % stages) for i, peer in enumerate(plain.peers)]
    modules = [
        ModuleStatus(
            name=f"stage-{stage + 1}",
            state=state,  # type: ignore[arg-type]
            position=position + (stage == 0),
            chain=f"{stage:02x}" * 32,
            params=350_000 + stage,
        )
        for stage in range(stages)
    ]
    return replace(plain, peers=peers, modules=with_peers(modules, peers))


def _of_stage(peer: PeerStatus, stage: int) -> PeerStatus:
    waits_for = ("step", "returns", "input")[stage % 3]
    flow = FlowStatus(
        counted=400 + stage,
        in_flight=4 - stage % 3,
        queued=stage % 2,
        omitted={"late": 3, "withdrawn": 8} if peer.name == NAMES[1] else {},
        resends=stage,
        double_counts=2 if stage == 1 else 0,
        waited_s={waits_for: 40.0, "route": 2.0},
    )
    return replace(
        peer,
        module=f"stage-{stage + 1}",
        utilisation=(0.56, 0.81, 0.44)[stage % 3],
        valid_loss=peer.valid_loss if stage == 0 else None,
        flow=flow,
    )
