"""Running a coordinator: state directory, keys, log, DHT node and gRPC server.

The state directory holds everything: a coordinator restarted with it continues its run, with the
same invite.

    lock            held while a coordinator uses the directory
    spec.json       the run's spec, canonical
    tokenizer.z     the run's tokenizer if it travels with the run; see run/tokenizer_file.py
    keys.json       see keys.py, 0600
    epoch.signed    see signing.py, 0600
    invites.json    see invites.py, 0600; with uses.json
    orders.json     see orders.py, 0600
    relocation.*    see relocating.py, 0600
    invite          the first invite, as it was printed last, 0600
    node.known      last addresses of peers, for the node to find them again
    node.key        identity of the run's first DHT node, 0600
    genesis.root    root of the first state
    recovery.key    see copies/sealing.py, 0600; with copies.json (copies/owners.py)
    port            the port chosen if `listen` asks for any
    ports.json      which ports were reached from outside, see ports.py
    log/            the log and its snapshots (atoll.optim.log.store)
    history.db      rounds, events and peers, for people
    checkpoints/    NAME-POSITION.safetensors

Exceptions:

    StartError
      WrongDirectory    the directory is of another run, not a coordinator's, or damaged
      InUse             the directory or the port is in use
      NoSuchHost        the address to advertise cannot be resolved
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc

from atoll.coordinator.catching_up import CatchUp, Recover
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.first_state import (
    ROOT_FILE,
    ROOT_NOTE,
    FirstState,
    FirstStateLost,
    RootDamaged,
)
from atoll.coordinator.gossip import FetchModel, KeptModels, ModelKeeper
from atoll.coordinator.heads import AskHead
from atoll.coordinator.history import History
from atoll.coordinator.invites import BASE_FILE, InviteDesk
from atoll.coordinator.kept_log import TICK_S, KeptLog, LogParts
from atoll.coordinator.orders import ORDERS_FILE, OrderDesk
from atoll.coordinator.ports import Ports
from atoll.coordinator.relocating import OwnPlace, own_record
from atoll.coordinator.rpc.messages import SERVER_OPTIONS
from atoll.coordinator.run.addresses import is_public, split_address
from atoll.coordinator.run.admission import AdmissionCheck
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.run.spec_problems import SpecError
from atoll.coordinator.run.tokenizer_file import TokenizerFileError, pack, unpack
from atoll.coordinator.service.front import Front
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.service import Service
from atoll.coordinator.service.watching import PortsWatch
from atoll.coordinator.signing import NONE_SIGNED, SIGNED_FILE, EpochSigner, begin, read_signed
from atoll.dht import verify
from atoll.dht.addresses import ip_of
from atoll.dht.tasks import Tasks
from atoll.optim.log.entry import genesis_chain, verify_key
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.mending import Damage, mend, reads_whole
from atoll.optim.log.module import Module, log_folder, log_id
from atoll.optim.log.replica import DISK_ERRORS, Replica
from atoll.optim.log.standing import ReplicaView
from atoll.optim.log.store import LOG_FILE, LogStore
from atoll.optim.log.stored_snapshots import sync_folder
from atoll.optim.state import vectors
from atoll.optim.state.mapped import MappedVectors, is_on_disk
from atoll.optim.state.outer_state import OuterState

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.z"
PORTS_FILE = "ports.json"
_TCP_PORT = re.compile(r"/tcp/(\d+)")
MANY_EPOCHS = 1 << 20  # above all that were signed, if nothing says how many
_GRACE_S = 1.0  # for calls in flight when the coordinator stops
_DAMAGED = "damaged; restore a copy, or start the run in a new directory"


class StartError(Exception):
    """The coordinator cannot start; nothing was overwritten."""


class WrongDirectory(StartError):
    """The state directory is of another run, not a coordinator's, or damaged."""


class InUse(StartError):
    """Another process uses the directory or port."""


class NoSuchHost(StartError):
    """The address to advertise cannot be resolved."""


class FirstNode(Protocol):
    """The run's first DHT node."""

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs with the PeerID, for invites."""
        ...

    def recover(self, module: str) -> Recover:
        """Return what brings the coordinator's replica of a module up to the peers'."""
        ...

    def ask_head(self, module: str) -> AskHead:
        """Return what asks peers where they stand in a module's log."""
        ...

    async def introduce(self, question: bytes) -> bytes:
        """Return signed records of peers (`atoll.dht.roster`); empty if it was malformed."""
        ...

    def tell_place(self, place: OwnPlace) -> None:
        """Let all peers know from now on where the coordinator is."""
        ...

    async def direct_connections(self) -> Mapping[str, Sequence[str]]:
        """Return the addresses of connected peers, except of those that a relay has shown."""
        ...

    def fetch_model(self, keeper: ReplicaView) -> FetchModel:
        """Return a function that fetches a peer's model, in a gossip run."""
        ...

    async def close(self) -> None:
        """Leave the network."""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """The arguments with which the DHT node is started."""

    run_id: bytes
    identity_path: Path
    host: str
    port: int
    advertise: str | None
    relay_mbit_s: float
    announce: tuple[tuple[str, int], ...] = ()
    """Hosts and ports under which peers reach the node, if something forwards them to it."""
    true_source: Callable[[str], str] = str
    """Returns the multiaddr of a forwarded connection's true source."""
    check: AdmissionCheck
    admit: Callable[[str], bytes]
    """Returns the credential of the node's own PeerID."""


StartNode = Callable[[NodeRequest], Awaitable[FirstNode]]
Genesis = Callable[[str], OuterState]
"""Returns the first state of a module, named as in `RunSpec.modules`."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A running coordinator."""

    invite: Invite
    coordinator: Coordinator
    address: str
    """Address of the gRPC server, 'host:port'."""
    state_dir: Path
    is_public: bool
    """True if one of the invite's addresses can be reached from the whole internet."""
    ports: Ports | None
    """What is known of the ports from outside; None without a DHT node."""
    is_behind: bool
    """True if the address to advertise is public, but this machine has private ones alone."""
    is_elsewhere: bool
    """True if the address to advertise is not of this machine, and no router explains that."""


async def serve(
    spec: RunSpec,
    genesis: Genesis,
    state_dir: Path,
    *,
    stop: asyncio.Event,
    start_node: StartNode | None = None,
    tokenizer: Callable[[], bytes] | None = None,
    on_ready: Callable[[Running], None] = lambda _: None,
) -> None:
    """Run a coordinator until `stop` is set; `on_ready` gets the invite.

    Args:
        spec: description of the run.
        genesis: returns a module's state at position 0; called only if the directory is new.
        state_dir: created if absent.
        stop: stops the coordinator; everything is on disk when this returns.
        start_node: starts the run's first DHT node.
        tokenizer: returns the file of the run's tokenizer; called only if it travels with the run
            and the directory lacks it.
        on_ready: called once peers can join.

    Raises:
        StartError, KeysError, StoreError: nothing was changed.
    """
    async with running(spec, genesis, state_dir, start_node=start_node, tokenizer=tokenizer) as up:
        on_ready(up)
        await stop.wait()


@contextlib.asynccontextmanager
async def running(
    spec: RunSpec,
    genesis: Genesis,
    state_dir: Path,
    *,
    start_node: StartNode | None = None,
    tokenizer: Callable[[], bytes] | None = None,
    costs: Sequence[float] = (),
    accept_loss: bool = False,
    state_on_disk: bool | None = None,
) -> AsyncIterator[Running]:
    """Run a coordinator inside the block.

    `costs` are those of a token in each module; by default, all are equal.

    With `accept_loss` it continues from its own log, whatever it has known beyond that. With
    `state_on_disk` the states of its logs lie in mapped files of its directory; by default those of
    a pipeline do, whose model may be larger than any machine's memory.
    """
    if state_on_disk is None:
        state_on_disk = len(spec.modules) > 1 and is_on_disk(state_dir)
    async with contextlib.AsyncExitStack() as stack:
        advertised = await _resolved(spec.coordinator.advertise)  # before anything is written
        stack.enter_context(_locked(state_dir))
        keys = _keys(state_dir, spec.modules)
        identifier = bytes.fromhex(run_id(spec, keys.run_public_key))
        _expect_spec(spec, state_dir / "spec.json")
        history = History(state_dir / "history.db")
        stack.callback(history.close)
        parts = [
            await _open_log(stack, spec, keys, log, genesis, history, accept_loss=accept_loss)
            for log in (
                LogFiles(state_dir, identifier, name, state_on_disk) for name in spec.modules
            )
        ]
        packed = await asyncio.to_thread(_tokenizer, spec, tokenizer, state_dir / TOKENIZER_FILE)
        nodes: list[FirstNode] = []
        coordinator = Coordinator(
            spec=spec,
            keys=keys,
            run_id=identifier,
            parts=parts,
            history=history,
            verify=verify,
            desk=InviteDesk(state_dir, keys.token),
            orders=OrderDesk(
                state_dir / ORDERS_FILE,
                run_id=identifier,
                spec=spec,
                verify_run=partial(verify_key, keys.run_public_key),
            ),
            costs=costs,
            accept_loss=accept_loss,
            bootstrap=lambda: [address for node in nodes for address in node.addresses],
        )
        stack.push_async_callback(coordinator.close)
        watch = PortsWatch(coordinator)
        service = Service(coordinator, packed, watch)
        address, front = await _listen(stack, coordinator, state_dir, service)
        if start_node is not None:
            nodes.append(await start_node(_node_request(coordinator, state_dir, front)))
            stack.push_async_callback(nodes[0].close)
            coordinator.introduce_with(nodes[0].introduce)
            for log in coordinator.logs.values():
                stack.push_async_callback(_fetching(log, nodes[0]).close)
            own = {*advertised, *map(ip_of, nodes[0].addresses)}
            watch.ports = _ports(address, nodes[0].addresses, own, state_dir)
        metrics = stack.enter_context(Metrics.served(spec.coordinator.metrics_listen))
        ticking = await stack.enter_async_context(Tasks())
        ticking.spawn(_tick(coordinator, metrics))
        if nodes:
            ticking.spawn(watch.keep_looking(nodes[0].direct_connections))
        invite = _invite(coordinator, address)
        place = _place(coordinator, invite, state_dir)
        for node in nodes:
            node.tell_place(place)
        _remember(state_dir / BASE_FILE, str(invite))
        yield Running(
            invite=invite,
            coordinator=coordinator,
            address=address,
            state_dir=state_dir,
            is_public=any(map(is_public, [*advertised, *_hosts(invite)])),
            ports=watch.ports,
            is_behind=_is_behind(advertised, split_address(address)[0]),
            is_elsewhere=_is_elsewhere(advertised, split_address(address)[0]),
        )


def _ports(address: str, addresses: Sequence[str], own: Collection[str], path: Path) -> Ports:
    """Return what an earlier start knew of the ports of gRPC and of the DHT node."""
    found = [int(match[1]) for each in addresses if (match := _TCP_PORT.search(each))]
    grpc_port = split_address(address)[1]
    return Ports.recalled(grpc_port, found[0] if found else 0, own, path / PORTS_FILE)


def _is_behind(advertised: Sequence[str], host: str) -> bool:
    """Return whether a router or a cloud provider holds the public address to advertise."""
    own = _own_address(host) if host in ("0.0.0.0", "::") else [host]
    return any(map(is_public, advertised)) and bool(own) and not any(map(is_public, own))


def _is_elsewhere(advertised: Sequence[str], host: str) -> bool:
    """Return whether the address to advertise is of another machine, as far as can be known here.

    A router may have a public address in front of private ones, but never a private one in front of
    public ones, nor another public one, or another private one on the same network.
    """
    is_ours = any(map(_is_own, advertised))
    return bool(advertised) and not is_ours and not _is_behind(advertised, host)


def _is_own(address: str) -> bool:
    """Return whether an IP address is one of this machine's: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _hosts(invite: Invite) -> list[str]:
    return [split_address(address)[0] for address in invite.addresses]


async def _resolved(advertise: str | None) -> list[str]:
    """Return the IP addresses of the host to advertise, none if there is none.

    Raises:
        NoSuchHost: it has none.
    """
    if advertise is None:
        return []
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(advertise, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise NoSuchHost(
            f"cannot resolve {advertise!r}, the address to advertise: {reason}; pass --advertise "
            "with a host name that peers can resolve, or with an IP address, and without a port"
        ) from None
    return [str(each[4][0]) for each in found]


def _fetching(log: KeptLog, node: FirstNode) -> CatchUp | KeptModels:
    """Start what keeps a log's state up to date."""
    if isinstance(log.replica.core, ModelKeeper):
        return log.fetch_models_with(node.fetch_model(log.replica))
    log.ask_head_with(node.ask_head(log.name))
    return log.recover_with(node.recover(log.name))


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    _expect_directory(state_dir)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartError(
            f"{state_dir}: cannot be used: {error.strerror}; choose another directory"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InUse(
            f"{state_dir}: another coordinator uses this directory; stop it, or choose another"
        ) from None
    finally:
        os.close(descriptor)


def _expect_directory(state_dir: Path) -> None:
    if not state_dir.exists() or (state_dir / KEYS_FILE).exists():
        return
    if not state_dir.is_dir():
        raise WrongDirectory(f"{state_dir}: expected a directory, got a file")
    names = (path.name for path in state_dir.iterdir())
    others = [name for name in names if name != "lock" and not name.startswith(".")]
    if others:
        raise WrongDirectory(
            f"{state_dir}: expected an empty directory or a coordinator's, got one that "
            f"contains {others[0]!r}; choose another"
        )


@dataclass(frozen=True)
class LogFiles:
    """The files of one log in a coordinator's directory; those of a dense run lie at the top."""

    state_dir: Path
    run_id: bytes
    module: str
    state_on_disk: bool = False

    @property
    def folder(self) -> Path:
        """The log and its snapshots."""
        return self.state_dir / log_folder(self.module)

    @property
    def has_log(self) -> bool:
        """True once the log was begun."""
        return (self.folder / LOG_FILE).exists()

    @property
    def checkpoints(self) -> Path:
        """The module's checkpoints."""
        return self.state_dir / "checkpoints" / self.module

    def file(self, name: str) -> Path:
        """Return the path of a file that each log has for itself."""
        return self.state_dir / (f"{self.module}.{name}" if self.module else name)


async def _open_log(
    stack: contextlib.AsyncExitStack,
    spec: RunSpec,
    keys: RunKeys,
    files: LogFiles,
    genesis: Genesis,
    history: History,
    *,
    accept_loss: bool,
) -> LogParts:
    """Open a log, or begin it; the history of the run is that of a dense run's log."""
    had_log = files.has_log
    first = await asyncio.to_thread(_first_state, files, genesis)
    core, damage = await asyncio.to_thread(_resume, spec, keys, files, first)
    replica = LiveReplica(core, compute=asyncio.to_thread)
    stack.push_async_callback(replica.close)  # after all that reads it
    if files.module:
        history = History(files.file("history.db"))
        stack.callback(history.close)
    signer = _signer(
        keys,
        replica,
        history,
        files.file(SIGNED_FILE),
        had_log=had_log,
        accept_loss=accept_loss,
    )
    return LogParts(
        replica=replica,
        history=history,
        checkpoints=files.checkpoints,
        signer=signer,
        first=first,
        damage=damage,
    )


def _first_state(files: LogFiles, genesis: Genesis) -> FirstState:
    try:
        return FirstState(partial(genesis, files.module), files.file(ROOT_FILE))
    except RootDamaged:
        raise WrongDirectory(f"{files.file(ROOT_FILE)}: {_DAMAGED}") from None


def _resume(
    spec: RunSpec, keys: RunKeys, files: LogFiles, first: FirstState
) -> tuple[Replica, Damage]:
    identifier = log_id(files.run_id, files.module)
    chain = genesis_chain(identifier, first.root)
    store = LogStore(files.folder, run_id=identifier, genesis_chain=chain, fsync=True)
    verify_run = partial(verify_key, keys.run_public_key)
    try:
        is_logged = spec.method().reduction != "pairs"  # else snapshots have roots for chains
        damage = mend(store, verify_run=verify_run) if is_logged else Damage()
        _expect_first(store, first, damage)
        module = Module(
            run_id=identifier,
            method=spec.method(),
            layout=store.snapshot(store.snapshot_positions()[0]).layout,
            snapshot_every=spec.round.snapshot_every,
            name=files.module,
            trust=spec.round.trust,
            units=spec.data.num_units,
        )
        kind = ModelKeeper if module.method.reduction == "pairs" else Replica
        replica = kind(
            module,
            store,
            verify=verify,
            verify_run=verify_run,
            is_ledger=True,
            allocate=MappedVectors(files.folder).empty if files.state_on_disk else vectors.empty,
        )
        replica.resume()
        # What making the first state left; a ledger needs no vector again.
        vectors.release()
        vectors.trim(module.layout.numel)
    except BaseException:
        store.close()
        raise
    return replica, damage


def _expect_first(store: LogStore, first: FirstState, damage: Damage) -> None:
    """Begin a log, or see that a state to begin with can be read; note what was not."""
    here = store.snapshot_positions()
    # What the first state is made from may not be on a machine that restored the run.
    begins_later = 0 not in here and store.note(ROOT_NOTE) is not None
    needed = reversed(here) if begins_later else [0]
    try:
        if 0 not in here and not begins_later:
            first.put(store)
        elif not any(reads_whole(store, position) for position in needed):
            found = first.mend(store)
            damage.first_state = found.first_state
            damage.snapshots += found.snapshots
    except FirstStateLost as error:
        raise WrongDirectory(str(error)) from None


def _signer(
    keys: RunKeys,
    replica: LiveReplica,
    history: History,
    path: Path,
    *,
    had_log: bool,
    accept_loss: bool,
) -> EpochSigner:
    """Return what signs the epochs, which knows of those in the log and in the history."""
    signer = EpochSigner(path, keys.sign)
    here = NONE_SIGNED if replica.opened is None else replica.opened.epoch
    known = max([here, *(summary.epoch for summary in history.rounds(1))])
    if accept_loss:
        if signer.highest is None:
            signer.note(known + MANY_EPOCHS)
        signer.accept_loss(here)
    elif known > NONE_SIGNED and not signer.is_restored:
        signer.note(known)
    elif signer.highest is None and had_log:
        signer.note(NONE_SIGNED)  # of an earlier version, and nobody has begun the run
    return signer


def _keys(state_dir: Path, modules: Sequence[str]) -> RunKeys:
    """Return the run's keys; new ones have signed nothing, which is on disk before them.

    Keys without a number beside them, as somebody restores them, may have signed any epoch.
    """
    path = state_dir / KEYS_FILE
    if not path.exists():
        for module in modules:
            begin(LogFiles(state_dir, b"", module).file(SIGNED_FILE))
    return RunKeys.load_or_create(path)


def _expect_spec(spec: RunSpec, path: Path) -> None:
    if path.exists():
        try:
            stored = RunSpec.from_json(path.read_bytes())
        except SpecError as error:
            raise WrongDirectory(f"{path}: {_DAMAGED} ({error})") from None
        differences = stored.differences(spec)
        if differences and not _is_unused(path.parent, stored.modules):
            raise WrongDirectory(
                f"{path.parent}: holds the state of another run, which differs in "
                f"{'; '.join(differences[:5])}. To keep both runs, pass --state-dir DIR or give "
                "the new one another run.name; to give up the old one, remove "
                f"{path.parent}, which holds its log and keys"
            )
        if differences:
            _forget_start(path.parent, stored.modules)
    _write(path, spec.canonical())


def _write(path: Path, data: bytes) -> None:
    """Write a file without which no start succeeds: whole or not at all, also if power is lost."""
    partial = path.with_name(f".{path.name}.new")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def _is_unused(state_dir: Path, modules: Sequence[str]) -> bool:
    """Return whether the run has not begun: it has its logs, and its key has signed no epoch.

    A directory that has lost a log is not unused, because peers may still have it.
    """
    logs = [LogFiles(state_dir, b"", module) for module in modules]
    return all(
        log.has_log == log.file(ROOT_FILE).exists()
        and read_signed(log.file(SIGNED_FILE))[0] == NONE_SIGNED
        for log in logs
    )


def _forget_start(state_dir: Path, modules: Sequence[str]) -> None:
    """Remove what a start wrote for a run that never began; its keys and ports stay."""
    log.warning(
        "no peer has begun the run in %s: it takes the edited configuration; an invite that was "
        "copied earlier is void",
        state_dir,
    )
    for files in (LogFiles(state_dir, b"", module) for module in modules):
        files.file(ROOT_FILE).unlink(missing_ok=True)  # first: the rest follows from it
        shutil.rmtree(files.folder, ignore_errors=True)
        for leftover in state_dir.glob(f"{files.file('history.db').name}*"):
            leftover.unlink()


def _tokenizer(spec: RunSpec, read: Callable[[], bytes] | None, path: Path) -> bytes:
    """Return the compressed tokenizer of the run, or nothing if it does not travel with it."""
    sha256, size = spec.data.tokenizer_sha256, spec.data.tokenizer_bytes
    if sha256 is None or size is None:
        return b""
    if not path.exists():
        packed = pack(read()) if read is not None else None
        if packed is None:
            raise WrongDirectory(
                f"{path}: the run's tokenizer is missing; restore a copy, or name the file in "
                "data.tokenizer"
            )
        _write(path, packed)
    packed = path.read_bytes()
    try:
        unpack(packed, sha256=sha256, size=size)
    except TokenizerFileError as error:
        raise WrongDirectory(f"{path}: {error}; restore a copy") from None
    return packed


async def _listen(
    stack: contextlib.AsyncExitStack, coordinator: Coordinator, state_dir: Path, service: Service
) -> tuple[str, Front]:
    """Serve gRPC behind a front; return its address for peers, and the front."""
    listen = coordinator.spec.coordinator.listen
    host, port = split_address(listen)
    port = port or _remembered_port(state_dir / "port")  # so that invites stay valid
    is_shared = listen == coordinator.spec.coordinator.dht_listen and bool(split_address(listen)[1])
    # No limit of gRPC's own, which refuses whoever comes late: `Service` bounds calls by caller.
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handler(),))
    credentials = grpc.ssl_server_credentials(
        [(coordinator.keys.tls_key, coordinator.keys.tls_certificate)]
    )
    inner = server.add_secure_port("127.0.0.1:0", credentials)
    front = Front(inner, _free_port() if is_shared else None)
    service.true_caller = front.caller
    stack.push_async_callback(front.close)
    await server.start()
    stack.push_async_callback(server.stop, _GRACE_S)
    await _open(front, host, port)
    (state_dir / "port").write_text(str(front.port))
    return _join_address(host, front.port), front


async def _open(front: Front, host: str, port: int) -> None:
    try:
        await front.listen([host], port)
    except OSError:
        raise _in_use(host, port) from None
    other = {"0.0.0.0": "::", "::": "0.0.0.0"}.get(host)
    if other is not None:
        with contextlib.suppress(OSError):  # a machine without that family
            await front.listen([other], front.port)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _in_use(host: str, port: int) -> InUse:
    return InUse(
        f"cannot listen on {_join_address(host, port)}: the port is in use, or the address is "
        "not this machine's; pass another with --listen HOST:PORT, or set coordinator.listen"
    )


def _remembered_port(path: Path) -> int:
    try:
        return min(int(path.read_text()), 65535)
    except (OSError, ValueError):
        return 0


def _node_request(coordinator: Coordinator, state_dir: Path, front: Front) -> NodeRequest:
    settings = coordinator.spec.coordinator
    host, port = split_address(settings.dht_listen)
    announce: tuple[tuple[str, int], ...] = ()
    if front.p2p_port is not None:
        announce = tuple((each, port) for each in _reachable_hosts(host, settings.advertise))
        host, port = "127.0.0.1", front.p2p_port
    return NodeRequest(
        run_id=coordinator.run_id,
        identity_path=state_dir / "node.key",
        host=host,
        port=port,
        advertise=settings.advertise,
        relay_mbit_s=settings.relay_mbit,
        announce=announce,
        true_source=front.multiaddr,
        check=AdmissionCheck(
            coordinator.keys.run_public_key,
            coordinator.run_id,
            is_evicted=coordinator.admission.is_evicted,
            is_revoked=coordinator.admission.is_revoked,
        ),
        admit=lambda peer_id: coordinator.admission.admit(peer_id, "coordinator"),
    )


def _invite(coordinator: Coordinator, address: str) -> Invite:
    host, port = split_address(address)
    hosts = _reachable_hosts(host, coordinator.spec.coordinator.advertise)
    closed = coordinator.spec.coordinator.invite_only
    return Invite(
        addresses=tuple(_join_address(each, port) for each in hosts),
        run_id=coordinator.run_id,
        run_key=coordinator.keys.run_public_key,
        tls_sha256=coordinator.keys.tls_sha256,
        bootstrap=tuple(coordinator.bootstrap())[:16],
        token=coordinator.keys.token if closed else b"",
    )


def _place(coordinator: Coordinator, invite: Invite, state_dir: Path) -> OwnPlace:
    """Return what peers are told of where this coordinator is, by its answers and by its node."""
    now_s, sign = coordinator.now_s(), coordinator.keys.sign
    coordinator.relocation = own_record(state_dir, invite, sign, now_s)
    return OwnPlace(state_dir, invite, coordinator.relocation, coordinator.report)


def _remember(path: Path, invite: str) -> None:
    """Keep the addresses and pins for `atoll invite`, which adds another token."""
    partial = path.with_name(f".{path.name}.new")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(invite + "\n")
    partial.replace(path)


def _reachable_hosts(host: str, advertise: str | None) -> list[str]:
    if advertise:
        return [advertise]
    if host not in ("0.0.0.0", "::"):
        return [host]
    # Peers of this machine reach it even if it has no network, or another one than now.
    return list(dict.fromkeys([*_own_address(host), "127.0.0.1"]))


def _own_address(host: str) -> list[str]:
    """The address of the interface that leads to the internet; nothing is sent."""
    family, target = (
        (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    )
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return [probe.getsockname()[0]]
    return []


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _tick(coordinator: Coordinator, metrics: Metrics | None) -> None:
    while True:
        try:
            await coordinator.tick()
            if metrics is not None:
                metrics.update(coordinator.status())
        except DISK_ERRORS as error:
            coordinator.report_disk(error)
        except Exception:
            log.exception("the coordinator continues, but something failed")
        await asyncio.sleep(TICK_S)
