"""Limits that a volunteer sets on `atoll peer`: the hours, the bandwidth, the GPU."""

import argparse
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.coordinator.run.notice import Notice
from atoll.peer.cli.watching import read_invite
from atoll.peer.daemon.options import MIN_CAP_MBIT_S, RELAY_MBIT_S, LinkRates
from atoll.peer.errors import SetupError

if TYPE_CHECKING:
    from atoll.peer.daemon.hours import Hours
    from atoll.peer.daemon.shifts import Rule

Tell = Callable[[Notice], None]


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add --max-mbit, --hours and --yield-gpu."""
    parser.add_argument(
        "--max-mbit",
        type=_cap,
        default=0.0,
        metavar="MBIT",
        help="Most bandwidth in Mbit/s for what this peer sends and for a state that it fetches, "
        f"at least {MIN_CAP_MBIT_S:g} (default: no limit). A round receives about as much as it "
        "sends.",
    )
    parser.add_argument(
        "--hours",
        type=_hours,
        metavar="HOURS",
        help="Hours of the day, by this machine's clock, in which to train, such as 22-8 or "
        "9:30-12,14-18; the peer leaves the run at the end of them and joins it again at the "
        "beginning (default: all day).",
    )
    parser.add_argument(
        "--yield-gpu",
        action="store_true",
        help="Leave the run while another program uses the GPU, and join again when it has been "
        "free for two minutes (NVIDIA).",
    )


def rates_of(args: argparse.Namespace) -> tuple[LinkRates, float]:
    """Return what the peer may use of the link, and what of that is for relaying.

    Raises:
        SetupError: relaying leaves too little of the cap.
    """
    cap, relay = args.max_mbit, args.relay_mbit
    if relay is None:
        relay = 0.0 if cap else RELAY_MBIT_S
    if cap and cap - relay < MIN_CAP_MBIT_S:
        raise SetupError(
            f"--relay-mbit {relay:g} leaves {max(cap - relay, 0):g} of --max-mbit {cap:g} Mbit/s, "
            f"expected {MIN_CAP_MBIT_S:g} at least; relay less, or allow more"
        )
    most = cap - relay if cap else 0.0
    # Leaders plan parts by the slower direction; they know of a downlink only what is declared.
    downlink = min(args.downlink or most, most) if cap else args.downlink
    rates = LinkRates(uplink_mbit_s=args.uplink, downlink_mbit_s=downlink, most_mbit_s=most)
    return rates, relay


def rules_of_one(args: argparse.Namespace, tell: Tell) -> tuple["Rule", ...]:
    """Return when to train of a peer of one process; a launcher watches the clock for its ranks.

    Raises:
        SetupError: as `rules_of`, or torchrun has started this rank.
    """
    from atoll.peer.daemon.launching import is_launched

    if "RANK" not in os.environ:
        return rules_of(args, tell)
    if (args.hours or args.yield_gpu) and not is_launched():
        raise SetupError(
            "--hours and --yield-gpu are for a peer that starts its own ranks, got one under "
            "torchrun; use --gpus instead of torchrun, or leave them out"
        )
    return ()


def rules_of(args: argparse.Namespace, tell: Tell, *, gpus: int = 0) -> tuple["Rule", ...]:
    """Return when to train.

    Args:
        args: of the command.
        tell: takes what the owner should know later.
        gpus: number of GPUs that train together; 0 for the one of --device.

    Raises:
        SetupError: the GPU does not tell who uses it; or this is no time to train, and the owner
            has not agreed to the run yet, so that it would ask when nobody is there.
    """
    rules: list[Rule] = []
    if args.hours is not None:
        from atoll.peer.daemon.hours import HoursRule

        rules.append(HoursRule(args.hours))
    if args.yield_gpu:
        from atoll.peer.daemon.gpu_use import GpuRule, NvmlMeter
        from atoll.peer.training.devices import gpu_uuids

        meter = NvmlMeter(gpu_uuids(args.device, gpus=gpus))
        rules.append(GpuRule(meter, tell))
    why = next(filter(None, (rule.why_not(is_training=False) for rule in rules)), "")
    if why and not args.yes:
        _expect_asked(args, why)
    return tuple(rules)


def _expect_asked(args: argparse.Namespace, why: str) -> None:
    from atoll.peer.paths import PeerPaths, peer_state_dir

    run_id = read_invite(args.invite).run_id.hex()
    if not PeerPaths(root=args.state_dir or peer_state_dir(run_id)).consent.exists():
        raise SetupError(
            "cannot ask later whether you accept what the run asks for, and now is no time to "
            f"train ({why}); start once without these limits and answer, or pass --yes"
        )


def mbit(text: str) -> float:
    """Read a rate. Raises ArgumentTypeError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of Mbit/s, got {text!r}")
    return rate


def _cap(text: str) -> float:
    rate = mbit(text)
    if rate < MIN_CAP_MBIT_S:
        raise argparse.ArgumentTypeError(
            f"expected at least {MIN_CAP_MBIT_S:g} Mbit/s, got {text!r}: others give up on slower "
            "peers"
        )
    return rate


def _hours(text: str) -> "Hours":
    from atoll.peer.daemon.hours import Hours

    try:
        return Hours.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
