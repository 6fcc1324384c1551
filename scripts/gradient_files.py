"""Count the files that a pseudo-gradient enters from the trainer until it is applied.

scripts/gradient_files.py                 in a round of four peers (DiLoCo, int8)

The peers, their daemons and the coordinator are those of a run, all in this process. From the
moment at which a trainer hands its first contribution in until every peer has applied the update, a
profiler looks at each call in our packages. A file counts if one of its functions is given the
pseudo-gradient, its cells, or the body of the update: bytes of at least an eighth of a cell, or as
many values outside the outer state; alone, in a sequence, or as a field of a record. The trainer's
functions above the handing in count too, but not what it does meanwhile. What decides on the update
and is given no part of it does not count: the leader, the votes, the pacing.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from atoll.optim.reducer import Contribution
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.beside import starting
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import RunOptions, Stop, join_and_train
from atoll.peer.training.trainer import Trainer
from atoll.peer.training.watched import WatchedReducer
from support.beside import InThread
from support.organiser import LOOPBACK, Organiser, tiny_spec, until

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("compression", "optim", "dht", "coordinator", "peer")
PEERS = 4
LEAST = 8192  # values, or bytes: far more than an entry with its certificate
# These take the body of a decided update to the coordinator; are given values for their shape; and
# are given other bytes.
BESIDE = (
    *("coordinator/", "peer/daemon/log_run.py", "peer/daemon/reporting.py"),
    *("compression/scratch.py", "dht/wirecount.py"),
)
DEPTH = 3  # a list of records that hold lists
DEADLINE_S = 300.0
SUBMIT = WatchedReducer.submit
RUN = {
    "run": {"name": "traced", "rounds": 0},
    "model": {"overrides": {"dim": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 192}},
    "outer": {"method": "diloco", "inner_steps": 4},
    "compression": {"codec": "int8"},
    "round": {"min_peers": PEERS, "stall_s": 20.0},  # a busy machine must not cost the round
}


class Tracer:
    """The profiler of all threads that begin after it."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        """functions by file"""
        self.is_on = False
        self._files: dict[CodeType, str] = {}
        self._seen: set[CodeType] = set()
        self._states: set[int] = set()
        """addresses of the outer state's values"""
        self.trainers: set[int] = set()
        """threads that train"""
        self._lock = threading.Lock()

    def begin(self, frame: FrameType | None) -> None:
        """Count the functions from the trainer's loop to the handing in, and begin to look."""
        while frame is not None and frame.f_code is not Trainer.run.__code__:
            self._note(frame.f_code)
            frame = frame.f_back
        self.is_on = True

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Look at a call."""
        code = frame.f_code
        is_new = self.is_on and event == "call" and code not in self._seen
        if not is_new or not self._file(code):
            return
        if threading.get_ident() in self.trainers and not _hands_in(frame):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(self._holds(frame.f_locals.get(name)) for name in names if name != "self"):
            self._note(code)

    def _file(self, code: CodeType) -> str:
        if code not in self._files:
            path = Path(code.co_filename)
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path()
            ours = inside.parts[:1] and inside.parts[0] in LAYERS
            is_beside = inside.as_posix().startswith(BESIDE)
            self._files[code] = inside.as_posix() if ours and not is_beside else ""
        return self._files[code]

    def _note(self, code: CodeType) -> None:
        with self._lock:
            if (file := self._file(code)) and code not in self._seen:
                self._seen.add(code)
                self.found.setdefault(file, []).append(code.co_qualname)

    def _holds(self, value: Any, depth: int = DEPTH) -> bool:
        if isinstance(value, OuterState):
            vectors = (value.params_N, value.memory_M)
            self._states |= {each.untyped_storage().data_ptr() for each in vectors}
            return False
        if isinstance(value, bytes | bytearray | memoryview):
            return len(value) >= LEAST
        if isinstance(value, torch.Tensor):
            is_large = value.is_floating_point() and value.numel() >= LEAST
            return is_large and value.untyped_storage().data_ptr() not in self._states
        return depth > 0 and any(self._holds(each, depth - 1) for each in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value[:4]
    elif isinstance(value, dict):
        yield from list(value.values())[:4]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))


def _hands_in(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is SUBMIT.__code__:
            return True
        frame = frame.f_back
    return False


def trace(folder: Path) -> dict[str, list[str]]:
    """Train until every peer has applied an update; return the functions by file."""
    tracer = Tracer()
    starting.start_process = InThread  # the tracer sees the threads of this process

    def submit(reducer: WatchedReducer, contribution: Contribution) -> None:
        tracer.begin(sys._getframe(1))
        SUBMIT(reducer, contribution)

    def train(name: str, stop: Stop) -> None:
        tracer.trainers.add(threading.get_ident())
        peer = PeerOptions(
            invite=organiser.invite, state_dir=folder / name, name=name, listen=LOOPBACK
        )
        options = RunOptions(peer=peer, device="cpu", yes=True)
        join_and_train(options, on_event=lambda event: None, stop=stop)

    WatchedReducer.submit = submit  # type: ignore[method-assign]
    threading.setprofile(tracer)
    organiser = Organiser(tiny_spec(**RUN), folder / "coordinator")
    organiser.start()
    stops = {f"peer-{number}": Stop() for number in range(PEERS)}
    threads = [threading.Thread(target=train, args=each, daemon=True) for each in stops.items()]
    for thread in threads:
        thread.start()
    try:
        until(lambda: organiser.status().position >= 1, "an update", DEADLINE_S)
    finally:
        for stop in stops.values():
            stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        organiser.stop()
    return tracer.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="Name the functions too.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trace(Path(folder))
    print(json.dumps(found if options.functions else sorted(found), indent=1))
    print(f"{len(found)} files")


if __name__ == "__main__":
    main()
