"""A peer's environment without a network: what reports and heartbeats are given."""

import types
from contextlib import ExitStack
from pathlib import Path

import torch

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing import MemoryBoard
from atoll.dht.testing.virtualtime import inline
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.options import LinkRates, PeerOptions
from atoll.peer.daemon.peer import Environment
from atoll.peer.daemon.reducer import TrainerProgress
from atoll.peer.daemon.reporting import Outbox, RoundsView
from atoll.peer.daemon.views import TrainerView
from atoll.peer.paths import PeerPaths

NOBODY = Invite(
    addresses=("127.0.0.1:9",), run_id=b"\x01" * 32, run_key=bytes(32), tls_sha256=bytes(32)
)
LAYOUT = Layout(names=("w",), shapes=((10,),))


def spec_of(rounds=0):
    return RunSpec.from_dict({"run": {"rounds": rounds}})


GENESIS = spec_of().method().genesis(LAYOUT, torch.ones(LAYOUT.numel))


def environment(me, *, rates=None, rounds=0, **changes):
    """An environment of a peer `ann`, with nothing on the wire."""
    wire = types.SimpleNamespace(wire_bytes_sent=0, wire_bytes_received=0, relayed_bytes=0)
    transport = types.SimpleNamespace(admission=b"old", statistics=lambda: wire, wire=wire)
    enrolment = changes.pop("enrolment", types.SimpleNamespace())
    enrolment.membership = types.SimpleNamespace(
        role="trainer", spec=spec_of(rounds), module="", layout=LAYOUT, genesis_root=GENESIS.root()
    )
    options = PeerOptions(
        invite=NOBODY, state_dir=Path("nowhere"), name="ann", rates=rates or LinkRates()
    )
    parts = {
        "options": options,
        "me": me,
        "identity": None,
        "paths": PeerPaths(root=options.state_dir),
        "files": ExitStack(),
        "client": None,
        "enrolment": enrolment,
        "node": types.SimpleNamespace(
            transport=transport, bootstrap=(), relays=(), roster=MemoryBoard().roster("ann")
        ),
        "neighbours": types.SimpleNamespace(reachability=types.SimpleNamespace(kind="direct")),
        "moves": None,
        "following": None,
        "company": types.SimpleNamespace(is_alone=False, unreached=(), withdraw=lambda: None),
        "outbox": Outbox(),
        "tasks": None,
        "report": lambda level, text, key=None: None,
        "on_phase": lambda phase, position, left=None: None,
        "compute": inline,
    }
    return Environment(**(parts | changes))


def started(view=None, *, has_started=True):
    """The progress of a trainer that reports a view."""
    spec = spec_of()
    progress = TrainerProgress(spec, spec.method(), 1)
    progress.watch(lambda: view or TrainerView())
    if has_started:
        progress.start()
    return progress


def rounds_view(rounds, encode_s=0.0):
    """How rounds go, as a run with a log reports it."""

    def view():
        stats = rounds.statistics()
        return RoundsView(phase=stats.phase, last=stats.last, encode_s=encode_s)

    return view
