"""`atoll init`: write a commented RUN.toml."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from atoll.coordinator.run.spec import RunSpec


class ExistsError(ValueError):
    """The file exists; it was not changed."""


class OneOfTwoError(ValueError):
    """--peers without --mbit, or --mbit without --peers."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll init`."""
    from atoll.peer.cli.plan import add_speed

    parser = new_parser(
        subparsers,
        "init",
        description="Write a RUN.toml in which every field is commented with its meaning and\n"
        "default. With --peers and --mbit, choose method, windows and codec from\n"
        "published measurements and from the time of a step on this machine (`atoll\n"
        "plan` lists all candidates). Existing files are never overwritten.",
        examples="atoll init\natoll init big-run.toml\natoll init --peers 1\n"
        "atoll init RUN.toml --peers 8 --mbit 100 --model 30m --step-ms 120",
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=Path("RUN.toml"),
        metavar="PATH",
        help="File to write (default: RUN.toml).",
    )
    parser.add_argument("--name", help="Name of the run (default: my-run).")
    parser.add_argument("--peers", type=int, metavar="P", help="Number of peers.")
    parser.add_argument(
        "--mbit", type=float, metavar="RATE", help="Per-peer bandwidth in Mbit/s, each way."
    )
    parser.add_argument("--model", default="nano", help="Model preset (default: nano).")
    add_speed(parser)
    parser.add_argument("--json", action="store_true", help="Print the choice as one line of JSON.")


def run(args: argparse.Namespace) -> int:
    """Write the file; raise ExistsError if there is one."""
    from atoll.coordinator.run.spec import template

    path: Path = args.path
    _expect_new(path)
    chosen = _chosen(args)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(chosen.spec))
    except FileExistsError:
        _expect_new(path)
    if args.json:
        print_json({"path": str(path), "why": list(chosen.why), **chosen.numbers})
        return 0
    for line in chosen.why:
        print(line)
    for line in left_open(chosen.spec, args.peers):
        print(line)
    if chosen.spec.unbounded:
        print(chosen.spec.unbounded)
    print(f"Wrote {path}. Next: atoll coordinator {path}")
    return 0


def left_open(spec: "RunSpec", peers: int | None) -> list[str]:
    """Return what a run of several peers keeps from its defaults and its organiser may not want."""
    if peers is None or peers == 1:
        return []
    begins = f"The run begins with {spec.round.min_peers} peers (round.min_peers)"
    ends = f"ends after {spec.run.rounds} rounds" if spec.run.rounds else "has no end"
    return [f"{begins} and {ends} (run.rounds)."]


def _expect_new(path: Path) -> None:
    if path.is_dir():
        raise ExistsError(f"{path} is a folder; name a file in it: {path / 'RUN.toml'}")
    if path.exists():
        raise ExistsError(f"{path} exists and was not changed; choose another name or move it")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The spec to write, and the reasons for it."""

    spec: "RunSpec"
    why: Sequence[str]
    numbers: dict[str, Any]


def _chosen(args: argparse.Namespace) -> Chosen:
    from atoll.coordinator.run.spec import RunSpec

    fields: dict[str, Any] = {"model": {"preset": args.model}}
    if args.name is not None:
        fields["run"] = {"name": args.name}
    if args.peers is None and args.mbit is None:
        return Chosen(spec=RunSpec.from_dict(fields), why=(), numbers={})
    if args.peers == 1:
        return _alone(fields)
    if args.peers is None or args.mbit is None:
        raise OneOfTwoError("--peers and --mbit must be given together")
    return _for_peers(args, fields)


def _alone(fields: dict[str, Any]) -> Chosen:
    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.lab import advice

    spec = RunSpec.from_dict(fields | {"round": {"min_peers": 1}})
    return Chosen(spec=spec, why=advice.ALONE, numbers={})


def _for_peers(args: argparse.Namespace, fields: dict[str, Any]) -> Chosen:
    from dataclasses import asdict

    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.cli.plan import how_timed, setting_of
    from atoll.peer.lab import advice
    from atoll.peer.lab.plan import bare_model

    plain = RunSpec.from_dict(fields)
    setting = setting_of(args, plain)
    known = advice.options(bare_model(plain), setting, step_tokens=plain.step_tokens)
    option = advice.pick(known)
    taken = advice.as_run(option.method, option.prediction.inner_steps)
    if option.prediction.inner_steps > 1:
        taken["outer"]["windows"] = "deadline"  # machines are seldom equally fast
    what, others = advice.reasons(option, known)
    by_speed = (advice.BY_SPEED,) if option.prediction.inner_steps > 1 else ()
    return Chosen(
        spec=RunSpec.from_dict(fields | taken),
        why=(
            what,
            f"A step takes {1000 * setting.step_s:.0f} ms ({how_timed(args)}). {others}",
            *by_speed,
        ),
        numbers={
            "setting": asdict(setting),
            "step_measured": args.step_ms is None,
            "chosen": asdict(option),
        },
    )
