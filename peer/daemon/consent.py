"""The owner's yes to a run: asked once, kept in the peer's state directory.

A spec is fixed by the run's id, which is in the invite, so one yes holds for the whole run. It is
asked after joining, which shows the spec, and before anything of the run is built, read or served,
in the trainer's process, which has the terminal, while the network process waits.
A tokenizer that travels with the run is fetched after the yes; it is parsed only if it has the
digest of the spec, and first in a process of its own (`atoll.peer.training.data.tokenizer_trial`).

`consent.json`, readable by its owner only:

    run_id     in hex
    digest     SHA-256, in hex, of what was asked: the digest of the spec and the parameters
    asked      the lines that the owner saw
    at         seconds since 1970

    NoRoom (ValueError)            this machine has too little memory or disk for the run
    NoOuterState (ValueError)      a run without a common state, which shall be kept on the disk
    ConsentMissing (ValueError)    no consent is stored, and there is no terminal
    Declined (RuntimeError)        the owner said no
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.text import size
from atoll.optim.log.module import WHOLE
from atoll.optim.log.replay import cells_of
from atoll.optim.log.store import KEPT_SNAPSHOTS
from atoll.optim.state.layout import Layout
from atoll.optim.state.mapped import expect_disk
from atoll.peer.extras import extra
from atoll.peer.paths import PeerPaths
from atoll.peer.training.data.documents import STDLIB
from atoll.peer.training.data.hub import HUB
from atoll.peer.training.data.tokens import BYTES
from atoll.peer.training.machine import memory_total
from atoll.peer.training.models import expect_source, preset
from atoll.peer.training.opening import expect_params, open_tokenizer
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.resources import (
    GPU_PROCESS_BYTES,
    Resources,
    Weights,
    moment_bytes,
    moments_of,
    resources,
    state_bytes,
)

ROUNDS_PER_DAY = 24 * 60  # an example: the time of a round is not known before the first one

Ask = Callable[[threading.Event], bool]
"""Asks the owner, who has seen the lines; returns whether the answer is yes. Raises
KeyboardInterrupt once the event is set."""


class NoRoom(ValueError):
    """The run needs more memory or disk than this machine has."""


class NoOuterState(ValueError):
    """The run has no common state that could be kept on the disk."""


class ConsentMissing(ValueError):
    """No earlier consent is stored, and there is no terminal to ask on."""


class Declined(RuntimeError):
    """The owner declined."""


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """The coordinator's answer to joining, as far as the owner is concerned."""

    spec: RunSpec
    layout: Layout
    module: str = WHOLE
    is_keeper: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """The demands of a run on a machine: model, data, disk, traffic."""

    digest: str
    lines: tuple[str, ...]


def request_of(
    spec: RunSpec,
    layout: Layout,
    *,
    module: str = WHOLE,
    data: str | None = None,
    tokenizer: str | None = None,
    is_keeper: bool = False,
    state_on_disk: bool = False,
    ranks: int = 1,
) -> Request:
    """Return what a run asks for, as the owner reads it.

    Args:
        spec: the spec of the run.
        layout: names and shapes of the parameters that this machine would train.
        module: the module of the run that they are of.
        data: the owner's own data, read instead of the spec's.
        tokenizer: the owner's own tokenizer.
        is_keeper: whether this machine leads and votes instead of training.
        state_on_disk: whether its owner wants the outer state in files.
        ranks: processes on this machine that train as one peer.
    """
    if is_keeper:
        return _request_of_keeper(spec, layout)
    own = with_own_files(spec, data=data, tokenizer=tokenizer)
    is_sent = tokenizer is None and spec.data.tokenizer_bytes is not None
    rounds = f"{spec.run.rounds} rounds" if spec.run.rounds else "until the organiser stops it"
    traffic, needs = round_bytes(spec, layout), needs_of(spec, layout, ranks=ranks)
    lines = (
        "the run asks this machine for the following:",
        f"run: {spec.run.name}, {rounds}",
        f"model: {_model(spec)}",
        f"parameters: {layout.numel:,}{_part(spec, module)}",
        f"data: {_data(own, is_own=data is not None)}",
        f"tokenizer: {_sent_tokenizer(spec) if is_sent else _tokenizer(own)}",
        f"method: {spec.outer.method}, {spec.outer.inner_steps} steps a round",
        *filter(None, [spec.unbounded]),
        f"memory: about {size(needs.host_memory(on_gpu=False))}; with a GPU about "
        f"{size(needs.host_memory(on_gpu=True))}, and {size(needs.gpu_memory)} of its own, at "
        f"least {size(needs.gpu_memory_least)}",
        *_mapped(needs, state_on_disk=state_on_disk),
        f"disk: about {size(needs.peer_disk)}, and {size(needs.peer_disk_free)} free beside it",
        f"traffic: about {size(traffic)} each way per round of {spec.outer.inner_steps} steps; "
        f"{size(traffic * ROUNDS_PER_DAY)} a day at one round a minute",
        *_flow_of(module),
    )
    # A peer of a pipeline may serve another stage later; its owner is not asked again for that.
    amount = layout.numel if module == WHOLE else f"{spec.topology.num_stages} stages"
    asked = f"atoll consent v1\0{spec.digest()}\0{amount}".encode()
    return Request(digest=hashlib.sha256(asked).hexdigest(), lines=lines)


def _mapped(needs: Resources, *, state_on_disk: bool) -> tuple[str, ...]:
    """Return how much of the memory lies in files, as the owner wishes."""
    if not state_on_disk:
        return ()
    on_cpu, on_host = (
        size(needs.host_memory(on_gpu=on_gpu, state_on_disk=True)) for on_gpu in (False, True)
    )
    return (
        f"outer state: on the disk, {size(needs.peer_state)}, which leaves {on_cpu} of that "
        f"memory, {on_host} with a GPU",
    )


def _part(spec: RunSpec, module: str) -> str:
    """Return which part of the model a module is, for people."""
    if module == WHOLE:
        return ""
    return (
        f", {module} of {spec.topology.num_stages}; the run may move this machine to another stage"
    )


def _flow_of(module: str) -> tuple[str, ...]:
    """Return what else a peer of a pipeline sends."""
    if module == WHOLE:
        return ()
    return (
        "pipeline: beside that, activations and their gradients travel between peers all the time, "
        "with the text's tokens, which peers of later stages can read",
    )


def needs_of(spec: RunSpec, layout: Layout, *, ranks: int = 1) -> Resources:
    """Return the memory and disk that a run needs, by what its spec and layout say.

    Args:
        spec: of the run.
        layout: of its model.
        ranks: processes on this machine that train as one peer.
    """
    method = spec.method()
    with torch.device("meta"):  # index tensors of a large model take no memory
        fragments = method.fragments(layout)
    # The layout does not say which optimizer gets which matrix, so this is the most they keep.
    weights = Weights(
        layout=layout,
        moment_bytes=moment_bytes(spec.inner, moments_of(method, layout)),
        frozen=_params_beneath(spec),
    )
    bodies = [cells_of(method, fragment).max_body_bytes(1) for fragment in fragments]
    return resources(spec, method, weights, peers=spec.planned_members, bodies=bodies, ranks=ranks)


def expect_room(
    needs: Resources,
    folder: Path,
    *,
    module: str = WHOLE,
    state_on_disk: bool = False,
    gpu_bytes: int | None = None,
) -> None:
    """Refuse a run that does not fit into this machine, before anything of it is fetched.

    Args:
        needs: of the run.
        folder: the peer's, which need not exist.
        module: the stage that this machine would serve, in a pipeline.
        state_on_disk: whether the outer state is kept in files there.
        gpu_bytes: memory of the GPUs that train together; None if the processor trains, or a GPU
            whose memory is the machine's own.

    Raises:
        NoRoom: it needs more memory than there is, or more disk than is free or its own by now.
    """
    what, smaller, gpus = "the run", "a smaller model", "on more GPUs with --gpus all, or "
    if module != WHOLE:  # which one process trains
        what, smaller, gpus = f"{module} of the run", "more stages, which are smaller", ""
    mapped = needs.peer_state if state_on_disk else 0
    least = needs.gpu_memory_least + GPU_PROCESS_BYTES
    if gpu_bytes is not None and least > gpu_bytes:
        raise NoRoom(
            f"{what} takes at least {size(least)} of GPU memory, for model, gradients, inner "
            f"optimizer and one sequence at a time, and there are {size(gpu_bytes)}; train {gpus}"
            f"on the processor with --device cpu, or ask the organiser for {smaller}, or "
            'inner.state = "8bit"'
        )
    held = partial(needs.host_memory, on_gpu=gpu_bytes is not None)
    memory, there = held(state_on_disk=state_on_disk), memory_total()
    if memory > there:
        fits = not state_on_disk and held(state_on_disk=True) <= there
        remedy = "keep the outer state in files with --outer-state disk" if fits else ""
        raise NoRoom(
            f"{what} needs {size(memory)} of memory, and this machine or container has "
            f"{size(there)}; {remedy or 'join from a larger machine'}, or ask the organiser for "
            f"{smaller}"
        )
    disk = needs.peer_disk + needs.peer_disk_free + mapped
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(nearest).free + own
    if disk > free:
        raise NoRoom(
            f"{what} needs {size(disk)} of disk, and {size(free)} are free where {folder} is; "
            "make room, or choose another place with --state-dir"
        )


def expect_common_state(spec: RunSpec) -> None:
    """Refuse to keep the outer state of a run by gossip on the disk.

    Raises:
        NoOuterState: each peer has a state of its own, which its trainer changes.
    """
    if not spec.method().logged:
        raise NoOuterState(
            f"--outer-state disk is for runs with a log, and {spec.outer.method} has none; omit it"
        )


def _request_of_keeper(spec: RunSpec, layout: Layout) -> Request:
    """Return what a keeper is asked for: no model is built, and no data is read."""
    rounds = f"{spec.run.rounds} rounds" if spec.run.rounds else "until the organiser stops it"
    disk = spec.round.log_mb * 10**6 + (1 + KEPT_SNAPSHOTS) * state_bytes(spec.method(), layout)
    lines = (
        "the run asks this machine for the following:",
        f"run: {spec.run.name}, {rounds}",
        "role: keeper, which leads and votes, and trains nothing",
        f"parameters: {layout.numel:,}, kept in memory and on the disk",
        f"disk: about {size(disk)}",
        f"traffic: about {size(round_bytes(spec, layout))} each way per round",
    )
    asked = f"atoll consent v1\0keeper\0{spec.digest()}\0{layout.numel}".encode()
    return Request(digest=hashlib.sha256(asked).hexdigest(), lines=lines)


def round_bytes(spec: RunSpec, layout: Layout) -> int:
    """Return the most payload that a peer sends, and receives, for one window of all fragments.

    A peer sends its cells to the owners of their parts and, as an owner, results to all others; by
    gossip it sends one partner its pseudo-gradient and its weights.
    """
    method, peers = spec.method(), spec.planned_members
    with torch.device("meta"):  # index tensors of a large model take no memory
        fragments = method.fragments(layout)
    total = 0
    for fragment in fragments:
        down = cells_of(method, fragment)
        up = replace(down, gathers=False, by_senders=False)
        back = up if method.reduction == "pairs" else down
        total += up.max_body_bytes(1) + back.max_body_bytes(peers)
    return total


def _params_beneath(spec: RunSpec) -> int:
    """Return the number of frozen parameters beneath adapters, as far as the spec states it."""
    model, vocab_size = spec.model, spec.model.overrides.get("vocab_size")
    if model.lora is None or model.custom is not None or type(vocab_size) is not int:
        return 0
    return preset(
        model.preset, model.overrides, vocab_size=vocab_size, seq_len=spec.data.seq_len
    ).num_params


def _model(spec: RunSpec) -> str:
    model = spec.model
    name = f"{model.preset}, built in" if model.init is None else "of the Llama family, built in"
    if model.custom is not None:
        name = f"{model.custom}, code on this machine"
        if model.source_sha256 is not None:
            name += f" with the SHA-256 {model.source_sha256[:12]}"
    if model.init is not None:
        name += f"; begins with the weights {model.init} (SHA-256 {(model.init_sha256 or '')[:12]})"
    if model.lora is not None:
        name += (
            f"; only adapters of rank {model.lora.rank} are trained, on your copy of the weights"
        )
    changed = ", ".join(f"{key}={value}" for key, value in model.overrides.items())
    compiled = "; compiled with torch.compile" if spec.inner.compile else ""
    return name + (f"; {changed}" if changed else "") + compiled


def _data(spec: RunSpec, *, is_own: bool) -> str:
    source, checked = spec.data.source, _digest(spec.data.sha256)
    if source.startswith(HUB) or spec.data.format == "hf":
        split = f" split {spec.data.split}," * (spec.data.split != "train")
        at = f", revision {spec.data.revision[:12]}" if spec.data.revision else ""
        return f"{source.removeprefix(HUB)},{split} streamed from the Hugging Face hub{at}"
    if source == STDLIB:
        return f"the source code of Python's standard library, on this machine{checked}"
    if is_own:
        return f"{source}, on this machine (--data)"
    return f"{source}, on this machine{checked}"


def _sent_tokenizer(spec: RunSpec) -> str:
    length = spec.data.tokenizer_bytes or 0
    return f"sent with the run, {size(length)}{_digest(spec.data.tokenizer_sha256)}"


def _tokenizer(spec: RunSpec) -> str:
    name = spec.data.tokenizer
    if name == BYTES:
        return "bytes, built in"
    return f"{name}, on this machine (--tokenizer){_digest(spec.data.tokenizer_sha256)}"


def _digest(sha256: str | None) -> str:
    return f", SHA-256 {sha256[:12]}" if sha256 else ""


@dataclass(frozen=True, kw_only=True)
class Consent:
    """Admits a run to this machine."""

    paths: PeerPaths
    run_id: bytes
    allowed: Allowed
    data: str | None = None
    tokenizer: str | None = None
    init: str | None = None
    state_on_disk: bool = False
    """the outer state is kept in files"""
    gpu_bytes: int | None = None
    """memory of the GPUs that train together; None if the processor trains"""
    ranks: int = 1
    """processes on this machine that train as this peer"""
    yes: bool = False
    """the owner has said yes in advance"""
    ask: Ask | None = None
    """asks the owner; None without a terminal"""
    stopping: threading.Event = field(default_factory=threading.Event)
    """ends the question"""
    show: Callable[[str], None] = lambda line: None
    """shows the owner a line of the request"""

    def admit(self, terms: RunTerms) -> bool:
        """Return if the owner wants to train this run; ask at most once.

        Returns:
            Whether the tokenizer that travels with the run has to come, before `expect_tokenizer`.

        Raises:
            ModelError, DataError: the run names code or files that the owner has not allowed, this
                machine's model or tokenizer is not the run's, or the model has another size than
                the coordinator says.
            NoRoom: this machine is too small for the run.
            NoOuterState, NotOnDisk: there is no state to keep in files, or no disk.
            ConsentMissing: there is no terminal to ask on.
            Declined: the owner said no.
        """
        if self.state_on_disk:
            expect_common_state(terms.spec)
            expect_disk(self.paths.root)
        if not terms.is_keeper:
            self._expect_usable(terms)
        self._expect_yes(terms)
        if terms.is_keeper:
            return False
        spec = self._own_spec(terms.spec)
        if spec.model.custom is not None and not self.allowed.any_source:
            expect_source(spec.model.custom, spec.model.source_sha256)  # before minutes of recovery
        return self._is_sent(spec)

    def expect_tokenizer(self, terms: RunTerms) -> None:
        """Open the tokenizer that has come; raise ModelError if the run's model is of another."""
        self._expect_params(self._own_spec(terms.spec), terms)

    def _own_spec(self, spec: RunSpec) -> RunSpec:
        return with_own_files(
            spec,
            data=self.data,
            tokenizer=self.tokenizer,
            init=self.init,
            sent_tokenizer=self.paths.tokenizer,
        )

    @property
    def _allowed(self) -> Allowed:
        return replace(self.allowed, sent_tokenizer=self.paths.tokenizer)

    def _is_sent(self, spec: RunSpec) -> bool:
        return spec.data.tokenizer == str(self.paths.tokenizer)

    def _expect_usable(self, terms: RunTerms) -> None:
        """Refuse a run that could not train here, before its owner is asked."""
        spec = self._own_spec(terms.spec)
        self._allowed.expect(spec)
        if spec.inner.state == "8bit":
            extra("torchao.optim", "inner.state = '8bit'")
        if self._is_sent(spec):
            extra("tokenizers", "the run's tokenizer")
        else:
            self._expect_params(spec, terms)  # the owner is shown this
        needs = needs_of(spec, terms.layout, ranks=self.ranks)
        expect_room(
            needs,
            self.paths.root,
            module=terms.module,
            state_on_disk=self.state_on_disk,
            gpu_bytes=self.gpu_bytes,
        )

    def _expect_params(self, spec: RunSpec, terms: RunTerms) -> None:
        vocab_size = open_tokenizer(spec, self._allowed).vocab_size
        expect_params(spec, vocab_size, terms.layout.numel, module=terms.module)

    def _expect_yes(self, terms: RunTerms) -> None:
        request = request_of(
            terms.spec,
            terms.layout,
            module=terms.module,
            data=self.data,
            tokenizer=self.tokenizer,
            is_keeper=terms.is_keeper,
            state_on_disk=self.state_on_disk,
            ranks=self.ranks,
        )
        if self._kept_digest() == request.digest:
            return
        for line in request.lines:
            self.show(line)
        if not self.yes:
            if self.ask is None:
                raise ConsentMissing(
                    "the run asks for what is listed above, and there is no terminal to ask on; "
                    "start this peer in a terminal once (without --json), or pass --yes"
                )
            if not self.ask(self.stopping):
                raise Declined("declined; no code of the run was run and no file was read")
        self._keep(request)

    def _kept_digest(self) -> str | None:
        try:
            kept = json.loads(self.paths.consent.read_bytes())
            same_run = kept["run_id"] == self.run_id.hex()
            return str(kept["digest"]) if same_run else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # a damaged file is no yes

    def _keep(self, request: Request) -> None:
        fields = {
            "run_id": self.run_id.hex(),
            "digest": request.digest,
            "asked": list(request.lines),
            "at": round(time.time()),
        }
        partial = self.paths.consent.with_suffix(".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # an older one may have had other rights
            file.write(json.dumps(fields, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.paths.consent)
