"""`atoll coordinator`: start a run and print its invite."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.peer.cli import (
    Subparsers,
    add_outer_state,
    add_stop_with_stdin,
    add_track,
    new_parser,
    print_json,
)
from atoll.peer.daemon.supervised import stop_with_stdin

if TYPE_CHECKING:
    from atoll.coordinator.copies.beside import CopyToRestore
    from atoll.coordinator.copies.rebuilding import FollowerToRestore
    from atoll.coordinator.copies.target import Target
    from atoll.coordinator.run.spec import RunSpec
    from atoll.coordinator.run.status import RunStatus
    from atoll.coordinator.service.server import Genesis, Running
    from atoll.optim.state.outer_state import OuterState
    from atoll.peer.tracking import Track

TRACKED = ("loss", "valid_loss", "tokens", "members", "wire_bytes", "rejected")  # of a round
FOLLOW_S = 0.5  # between two reads of our own state; a round takes seconds


class InviteFileError(ValueError):
    """The invite file cannot be written, or holds something other than an invite."""


class OnePortError(ValueError):
    """One port cannot be shared as asked."""


class NoRun(ValueError):
    """The options name no run to start or to restore."""


class NoKeepers(ValueError):
    """A keeper is asked for in a run in which members vote."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll coordinator`."""
    parser = new_parser(
        subparsers,
        "coordinator",
        description="Start a run or resume one: admit peers, keep the log of all rounds, write\n"
        "checkpoints. Print the invite on stdout and everything else on stderr. Training\n"
        "continues while the coordinator is down; after a restart the invite is the same.",
        examples="atoll coordinator RUN.toml\n"
        "atoll coordinator RUN.toml --advertise 203.0.113.7\n"
        "atoll coordinator RUN.toml --keep\n"
        "atoll coordinator RUN.toml --invite-file invite.txt --quiet &\n"
        "atoll coordinator RUN.toml --copies s3://bucket/my-run\n"
        "atoll coordinator --restore s3://bucket/my-run --recovery-key recovery.key\n"
        "atoll coordinator --restore FOLLOWER_DIR --keys backup/keys.json",
    )
    parser.add_argument(
        "spec",
        type=Path,
        nargs="?",
        metavar="RUN.toml",
        help="Configuration written by `atoll init`; with --restore, the copy's by default.",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="State directory (default: ~/.local/state/atoll/coordinators/NAME).",
    )
    for name, what in (
        ("listen", "of the gRPC service; overrides the file (default: 0.0.0.0:7700)."),
        ("dht-listen", "of the DHT node; overrides the file (default: 0.0.0.0:7701)."),
        ("metrics-listen", "of a Prometheus endpoint (default: none)."),
    ):
        parser.add_argument(f"--{name}", metavar="HOST:PORT", help=f"Address {what}")
    parser.add_argument(
        "--one-port",
        action="store_true",
        help="Serve gRPC and the DHT node on the port of --listen alone.",
    )
    parser.add_argument(
        "--copies",
        metavar="TARGET",
        help="Folder or URL of fsspec for copies of the run; overrides the file (default: none).",
    )
    parser.add_argument(
        "--restore",
        metavar="TARGET",
        help="Continue a run from its copies there, or from the folder of a follower, in a new "
        "state directory, with the same invite; the run's former coordinator must not run any "
        "more.",
    )
    parser.add_argument(
        "--recovery-key",
        type=Path,
        metavar="FILE",
        help="With --restore: the recovery.key of the state directory that was lost.",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="With --restore of a follower's folder: a copy of the former coordinator's keys.json. "
        "Invites, orders and the node's key beside it are taken too.",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="With --restore: take the copy before the newest one, if that is damaged.",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST",
        help="Host name or address under which peers reach this machine.",
    )
    parser.add_argument(
        "--invite-file", type=Path, metavar="PATH", help="Also write the invite to this file."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print invite, run id and address as a line of JSON, then one for each round, event "
        "and change of state.",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="Run a keeper on this machine too, in a process that ends with this one; for runs "
        'with electors = "keepers".',
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="Continue from the log here although it lacks rounds or epochs that no peer has any "
        "more; what peers hold beyond it is void.",
    )
    add_outer_state(parser, default=None, told="disk in a run with stages, else memory")
    parser.add_argument("--quiet", action="store_true", help="Print no line per round.")
    add_track(parser)
    add_stop_with_stdin(parser)


def run(args: argparse.Namespace) -> int:
    """Run the coordinator until a signal stops it."""
    if args.stop_with_stdin:
        stop_with_stdin()
    from atoll.coordinator.copies.beside import open_target
    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.paths import coordinator_state_dir
    from atoll.peer.tracking import check as check_tracker
    from atoll.peer.tracking import tracked
    from atoll.peer.training.digests import with_digests

    copy = _copy_to_restore(args)
    spec = with_addresses(RunSpec.load(args.spec) if copy is None else copy.spec, args)
    if args.keep and spec.round.electors != "keepers":
        raise NoKeepers(
            '--keep is for runs in which keepers vote; set electors = "keepers" in [round] of '
            f"{args.spec}, or omit --keep"
        )
    if args.outer_state == "disk":
        from atoll.peer.daemon.consent import expect_common_state

        expect_common_state(spec)
    if args.invite_file is not None:
        _expect_own_file(args.invite_file)
    for told in args.track:
        check_tracker(told)
    state_dir: Path = args.state_dir or coordinator_state_dir(spec.run.name)
    if copy is not None:
        copy.restore(spec, state_dir, say)
    copies = spec.coordinator.copies
    target = open_target(copies, state_dir, say) if copies is not None else None
    spec = with_digests(spec, spec_in(state_dir), say)
    genesis = first_state(spec, state_dir)
    costs = costs_of(spec)

    def on_ready(up: Running) -> None:
        announce(up, as_json=args.json)
        if args.invite_file is not None:
            write_invite(args.invite_file, str(up.invite))

    with tracked(
        args.track, name=spec.run.name, on_trouble=lambda text: say(f"warning: {text}")
    ) as track:
        serving = _serve(
            spec,
            genesis,
            state_dir,
            costs=costs,
            on_ready=on_ready,
            quiet=args.quiet,
            as_json=args.json,
            track=track if args.track else None,
            has_keeper=args.keep,
            accept_loss=args.accept_loss,
            state_on_disk=None if args.outer_state is None else args.outer_state == "disk",
            copies=target,
        )
        return asyncio.run(serving)


def _copy_to_restore(args: argparse.Namespace) -> CopyToRestore | FollowerToRestore | None:
    """Return the copy that --restore means; None without. Raises NoRun, CopiesError."""
    if args.restore is None:
        if args.recovery_key is not None or args.older or args.keys is not None:
            raise NoRun("--recovery-key, --keys and --older are for --restore TARGET")
        if args.spec is None:
            raise NoRun("name RUN.toml, or the copies of a run with --restore TARGET")
        return None
    from atoll.coordinator.copies.rebuilding import FollowerToRestore, is_followers

    if is_followers(args.restore):
        if args.keys is None or args.recovery_key is not None or args.older:
            raise NoRun(
                f"{args.restore} is the folder of a follower, which has no keys: pass --keys with "
                "a copy of the former coordinator's keys.json, without --recovery-key and --older"
            )
        return FollowerToRestore.found(
            Path(args.restore), args.keys, args.spec, state_dir=args.state_dir
        )
    if args.keys is not None:
        raise NoRun(f"--keys is for the folder of a follower, which {args.restore} is not")
    if args.recovery_key is None:
        raise NoRun("--restore needs --recovery-key with the file that was kept for this")
    from atoll.coordinator.copies.beside import CopyToRestore

    return CopyToRestore.found(
        args.restore, args.recovery_key, args.spec, state_dir=args.state_dir, older=args.older
    )


def with_addresses(spec: RunSpec, args: argparse.Namespace) -> RunSpec:
    """Return the spec with the addresses from the command line.

    Raises:
        SpecError: one of them is not an address.
    """
    names = ("listen", "dht_listen", "metrics_listen", "advertise", "copies")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    told = spec.model_dump(mode="json")
    told["coordinator"].update(given)
    if getattr(args, "one_port", False):
        told["coordinator"]["dht_listen"] = _shared_address(told["coordinator"], args)
    return type(spec).from_dict(told, source="command line")


def _shared_address(told: dict[str, Any], args: argparse.Namespace) -> Any:  # noqa: ANN401
    if args.dht_listen is not None:
        raise OnePortError("--one-port and --dht-listen exclude each other; omit one of them")
    if str(told["listen"]).endswith(":0"):
        raise OnePortError("--one-port needs the number of the port; pass --listen HOST:PORT")
    return told["listen"]


def spec_in(state_dir: Path) -> RunSpec | None:
    """Return the spec with which the run of a directory began; None for a new run."""
    from atoll.coordinator.run.spec import RunSpec
    from atoll.coordinator.run.spec_problems import SpecError

    try:
        return RunSpec.from_json((state_dir / "spec.json").read_bytes())
    except (OSError, SpecError):
        return None  # the coordinator reports a damaged one


def first_state(spec: RunSpec, state_dir: Path) -> Genesis:
    """Return a factory of the first states of the run's modules.

    For a new run the first one is built at once, so that a model that cannot be built leaves no
    directory behind.

    Raises:
        SetupError: the model or the tokenizer is not usable.
    """
    from atoll.peer.training import opening
    from atoll.peer.training.permission import Allowed

    own = Allowed.everything_in(spec)  # the organiser's own file names it

    def make(module: str) -> OuterState:
        if module in made:
            return made.pop(module)
        return opening.first_state(spec, own, module=module, own_loop=True)

    made: dict[str, OuterState] = {}
    if not (state_dir / "spec.json").exists():
        made[spec.modules[0]] = make(spec.modules[0])
    return make


def costs_of(spec: RunSpec) -> Sequence[float]:
    """Return what a token costs in each stage that patterns name; nothing if all count as equal.

    Those of a number of stages are as equal as the model's slices allow. A run that has begun needs
    no model here; without it, stages count as equal too.
    """
    from atoll.peer.errors import SetupError
    from atoll.peer.training import opening
    from atoll.peer.training.permission import Allowed

    if isinstance(spec.topology.stages, int):
        return ()
    own = Allowed.everything_in(spec)
    try:
        known = opening.slices_of(spec, opening.open_tokenizer(spec, own).vocab_size, own)
    except SetupError as error:
        say(f"warning: newcomers are placed as if all stages cost the same: {error}")
        return ()
    return [needs.cost for needs in opening.stage_needs(spec, known)]


async def _serve(
    spec: RunSpec,
    genesis: Genesis,
    state_dir: Path,
    *,
    costs: Sequence[float],
    on_ready: Callable[[Running], None],
    quiet: bool,
    as_json: bool,
    track: Track | None,
    has_keeper: bool,
    accept_loss: bool,
    state_on_disk: bool | None,
    copies: Target | None,
) -> int:
    from atoll.coordinator.copies.beside import copying
    from atoll.coordinator.service.server import running
    from atoll.dht.tasks import Tasks, race
    from atoll.peer.daemon.reach.bootstrap import BootstrapNode
    from atoll.peer.lab.own_keeper import keep_beside
    from atoll.peer.training.digests import read_tokenizer

    admission_s = spec.coordinator.admission_hours * 3600
    stop = asyncio.Event()
    received = _stop_on_signals(stop)
    async with (
        running(
            spec,
            genesis,
            state_dir,
            start_node=lambda request: BootstrapNode.start(request, admission_s=admission_s),
            tokenizer=lambda: read_tokenizer(spec),
            costs=costs,
            accept_loss=accept_loss,
            state_on_disk=state_on_disk,
        ) as up,
        copying(up, copies, say) as keeping,
    ):
        on_ready(up)
        spare_searches()
        async with Tasks() as telling:
            if (as_json and not quiet) or track is not None:
                telling.spawn(_record(up, track, as_json=as_json and not quiet))
            if not quiet:
                telling.spawn(_tell(up))
                telling.spawn(_tell_ports(up))
            if has_keeper:
                telling.spawn(keep_beside(up, say))
            await race(stop.wait(), *([] if keeping is None else [keeping.run()]))
    return 130 if received == [signal.SIGINT] else 0


def spare_searches() -> None:
    """Leave what is here by now out of the searches for garbage.

    Each would look through all of torch: 150 ms every few seconds, in which no call is answered.
    """
    gc.collect()
    gc.freeze()


def _stop_on_signals(stop: asyncio.Event) -> list[signal.Signals]:
    """Set `stop` at the first SIGINT or SIGTERM and list it; a second one ends the process."""
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def note(number: signal.Signals) -> None:
        received.append(number)
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    return received


async def _tell(up: Running) -> None:
    from atoll.coordinator.report.plain import follow

    async def feed() -> RunStatus:
        return up.coordinator.status()

    status = up.coordinator.status()
    if status.position:  # restarted: an earlier process printed these rounds
        say(f"resuming after round {status.position}")
    since = status if status.position else None
    await follow(feed, say, interval_s=FOLLOW_S, since=since)
    checkpoint = up.coordinator.last_checkpoint()
    say(f"run complete; checkpoint: {checkpoint or 'none'}")
    say("still serving peers; press Ctrl-C to stop")


async def _record(up: Running, track: Track | None, *, as_json: bool) -> None:
    """Print what happens as JSON, and pass the numbers of rounds to trackers."""
    from atoll.coordinator.report.records import Record, follow

    async def feed() -> RunStatus:
        return up.coordinator.status()

    def write(record: Record) -> None:
        if as_json:
            print_json(record)
        if record["kind"] == "round" and track is not None:
            track(record["position"], {name: record.get(name) for name in TRACKED})

    status = up.coordinator.status()
    # An earlier process has told of the rounds before.
    await follow(feed, write, interval_s=FOLLOW_S, since=status if status.position else None)


async def _tell_ports(up: Running) -> None:
    """Print what joiners find at the ports; `follow` prints the warnings among it."""
    told = str(up.ports)
    while up.ports is not None:
        await asyncio.sleep(FOLLOW_S)
        if str(up.ports) != told:
            told = str(up.ports)
            if not up.ports.is_wrong:
                say(told)


def announce(up: Running, *, as_json: bool) -> None:
    """Print the invite on stdout, and how to use it on stderr."""
    from atoll.peer.training.permission import options_for

    spec, status = up.coordinator.spec, up.coordinator.status()
    say(f"run {spec.run.name} ({status.run_id[:12]}), {status.params:,} parameters")
    say(f"listening on {up.address}; state in {up.state_dir}")
    say(f"back up {up.state_dir / 'keys.json'}: the run cannot be continued without it")
    say(f"the invite contains {' and '.join(up.invite.addresses)}")
    for line in about_ports(up):
        say(line)
    join = " ".join(["atoll peer INVITE", *options_for(spec)])
    say("`atoll invite` limits an invite to some peers or to watching; `atoll evict` removes one")
    if spec.round.electors == "keepers":
        say("`atoll invite --role keeper` makes an invite for a keeper, which leads and votes")
    say(f"join with `{join}`, watch with `atoll dashboard INVITE`:")
    if as_json:
        print_json(
            {
                "invite": str(up.invite),
                "run_id": status.run_id,
                "address": up.address,
                "state_dir": str(up.state_dir.absolute()),
            }
        )
    else:
        print(up.invite, flush=True)


def about_ports(up: Running) -> list[str]:
    """Return what the organiser should know about reaching this machine from outside."""
    ports, spec = up.ports, up.coordinator.spec
    if ports is not None and ports.is_known:  # joiners know better than the addresses do
        prefix = "warning: " if ports.is_wrong else ""
        return [f"{prefix}found by joiners so far: {ports}"]
    if not up.is_public:
        return [*([elsewhere(spec)] if up.is_elsewhere else []), not_public(spec)]
    lines = [str(ports)] if ports is not None else []
    if up.is_elsewhere:
        lines.append(elsewhere(spec))
    if up.is_behind:
        lines.append(
            "this machine has only a private address: a router or the cloud provider must "
            f"forward TCP ports {_numbers(spec) or 'of both listeners'} from "
            f"{spec.coordinator.advertise} to it"
        )
    return lines


def _numbers(spec: RunSpec) -> str:
    from atoll.coordinator.run.addresses import split_address

    both = (spec.coordinator.listen, spec.coordinator.dht_listen)
    numbers = (str(port) for each in both if (port := split_address(each)[1]))
    return " and ".join(dict.fromkeys(numbers))


def elsewhere(spec: RunSpec) -> str:
    """Return the warning about an address to advertise that is another machine's."""
    return (
        f"warning: {spec.coordinator.advertise} is no address of this machine, and peers will dial "
        "it: pass the right one with --advertise, unless something there forwards the ports to here"
    )


def not_public(spec: RunSpec) -> str:
    """Return the warning about an invite without a public address."""
    numbers = _numbers(spec)
    forward = f", and forward TCP ports {numbers} to this machine" if numbers else ""
    return (
        "warning: none of these addresses is public, so that only peers on this network can join; "
        f"for others, pass --advertise with the router's public address{forward}"
    )


def _expect_own_file(path: Path) -> None:
    if not path.parent.is_dir():
        raise InviteFileError(f"{path}: the folder does not exist; create it first")
    if not path.exists():
        return
    with path.open("rb") as file:
        start = file.read(6)
    if start not in (b"", b"atoll1"):
        raise InviteFileError(
            f"{path} holds something other than an invite and was not changed; choose another file"
        )


def write_invite(path: Path, invite: str) -> None:
    """Write the file atomically, readable by its owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(invite + "\n")
    partial.replace(path)


def say(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)
