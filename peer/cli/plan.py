"""`atoll plan`: estimate the cost of a run before it is started."""

import argparse
import textwrap
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from atoll.coordinator.run.spec import RunSpec
    from atoll.optim.schedules import Timetable
    from atoll.peer.lab.advice import RunOption
    from atoll.peer.lab.plan import Setting
    from atoll.peer.lab.stage_plan import PipelineCost, StageCost
    from atoll.peer.training.resources import Resources


WIDTH = 80  # columns
NAME_WIDTH = 25  # so that a row fits into 80 columns; longer names get a line of their own
LEGEND = """
MB: sent per window. lost: time per window without computing. GB RAM: peak of
a round on the processor, without activations. to ddp: loss above
data parallel at equal steps; same time: loss above data parallel that never
waits, at equal time, by which the advice chooses.
"""

STAGED_LEGEND = """
out, in: bytes that a peer sends and receives for each token that goes through
it, its rounds included. tokens/s by: what all peers of the stage can compute,
and what their links can carry. GB RAM: peak, without activations.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll plan`."""
    parser = new_parser(
        subparsers,
        "plan",
        description="Estimate bytes, round time, utilisation and memory for each benchmarked\n"
        "method and codec, and recommend one. Compute time is measured on this\n"
        "machine; pass --step-ms to use a known step time instead.\n\n"
        "For a run with stages: bytes of a token on each link, memory and speed of each\n"
        "stage, and the one that binds.",
        examples="atoll plan RUN.toml --peers 8 --mbit 100\n"
        "atoll plan RUN.toml --peers 4 --mbit 50 --rtt-ms 80 --step-ms 120 --json",
    )
    parser.add_argument(
        "path", type=Path, metavar="RUN.toml", help="Configuration written by `atoll init`."
    )
    parser.add_argument("--peers", type=int, required=True, metavar="P", help="Number of peers.")
    parser.add_argument(
        "--mbit",
        type=float,
        required=True,
        metavar="RATE",
        help="Per-peer bandwidth in Mbit/s, each way.",
    )
    add_speed(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="Processes that train as one peer on a machine, as --gpus starts them (default: 1).",
    )
    parser.add_argument(
        "--all", action="store_true", help="List every method with every window length."
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON.")


def add_speed(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe links, cores and the step time."""
    parser.add_argument(
        "--rtt-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="Round trip between two peers (default: 50).",
    )
    parser.add_argument(
        "--cores",
        type=float,
        default=2.0,
        metavar="N",
        help="CPU cores per peer for communication (default: 2).",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="Time of an inner step of the whole model with AdamW (default: measured).",
    )
    parser.add_argument(
        "--device", default="auto", help="Device to measure a step on (default: auto)."
    )


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.lab import advice
    from atoll.peer.lab.plan import bare_model, needed, windows_of

    spec = RunSpec.load(args.path)
    if spec.topology.num_stages > 1:
        return _run_staged(args, spec)
    setting = setting_of(args, spec)
    model = bare_model(spec)
    needs = needed(spec, model, setting.peers, ranks=args.ranks)
    windows = windows_of(spec, model)
    inner_steps = windows.mean_window(spec.run.rounds)
    at = partial(advice.options, model, setting, step_tokens=spec.step_tokens)
    mine = advice.option_of(
        spec.method(),
        model,
        setting,
        step_tokens=spec.step_tokens,
        inner_steps=inner_steps,
    )
    known = at()
    chosen = advice.pick(known) if setting.peers > 1 else mine
    shown = known if args.all else at(windows=(inner_steps,))
    if args.json:
        told = _told(args, setting, model, mine, shown, chosen)
        print_json(told | {"needs": asdict(needs)})
        return 0
    print(_heading(args, spec, setting, model))
    if spec.outer.windows == "qsr":
        print(_grown(spec.run.rounds, windows))
    if spec.outer.windows == "deadline":
        print(advice.BY_SPEED + "\n")
    for line in table([mine, *shown]):
        print(line)
    print(LEGEND)
    print(_needs(needs))
    if spec.unbounded:
        print(spec.unbounded)
    for line in advice.ALONE if setting.peers == 1 else advice.reasons(chosen, known):
        print(line)
    return 0


def _run_staged(args: argparse.Namespace, spec: "RunSpec") -> int:
    """Predict and print what a pipeline costs; there is no choice of method."""
    from atoll.peer.lab.plan import PlanError
    from atoll.peer.lab.stage_plan import predict_pipeline, spread

    # Before a step is timed, which takes seconds.
    spread(args.peers, [1.0] * spec.topology.num_stages)
    if spec.model.custom is not None and args.step_ms is None:
        raise PlanError(
            "the slices of a custom model cannot be timed together; give the time of a step of the "
            "whole model with --step-ms"
        )
    setting = setting_of(args, spec)
    cost = predict_pipeline(spec, setting)
    if args.json:
        told = {
            "params": sum(stage.params for stage in cost.stages),
            "setting": asdict(setting),
            "step_measured": args.step_ms is None,
            "pipeline": asdict(cost) | {"binds": cost.binds.name, "bound": cost.binds.bound},
        }
        print_json(told)
        return 0
    print(_staged_heading(args, spec, setting, cost))
    for line in stage_table(cost):
        print(line)
    print(STAGED_LEGEND)
    print(textwrap.fill(_staged_summary(spec, cost), WIDTH))
    return 0


def _staged_heading(
    args: argparse.Namespace, spec: "RunSpec", setting: "Setting", cost: "PipelineCost"
) -> str:
    params = sum(stage.params for stage in cost.stages)
    text = (
        f"{spec.model.title}, {params / 1e6:.3g}M parameters in {len(cost.stages)} stages; "
        f"{setting.peers} peers, {setting.mbit_s:g} Mbit/s, {1000 * setting.rtt_s:g} ms; a step of "
        f"the whole model takes {1000 * setting.step_s:.0f} ms ({how_timed(args)})"
    )
    return textwrap.fill(text, WIDTH) + "\n"


def stage_table(cost: "PipelineCost") -> list[str]:
    """Return a heading and one line per stage."""
    head = f"{'':10}{'':9}{'':6}{'':8}{'':8}{'bytes a token':>14}{'tokens/s by':>16}"
    units = (
        f"{'':10}{'slices':>9}{'peers':>6}{'params':>8}{'GB RAM':>8}{'out':>7}{'in':>7}"
        f"{'compute':>9}{'link':>7}"
    )
    return [head, units, *(_stage_line(stage, stage == cost.binds) for stage in cost.stages)]


def _stage_line(stage: "StageCost", binds: bool) -> str:
    from atoll.coordinator.run.text import count

    line = (
        f"{stage.name:10}{f'{stage.first_slice} to {stage.last_slice}':>9}{stage.peers:6}"
        f"{count(stage.params):>8}{_figure(stage.memory_bytes / 1e9, 8)}"
        f"{stage.up_bytes_per_token:7.0f}{stage.down_bytes_per_token:7.0f}"
        f"{count(stage.compute_tokens_per_s):>9}{count(stage.link_tokens_per_s):>7}"
    )
    return f"{line}  binds" if binds else line


def _staged_summary(spec: "RunSpec", cost: "PipelineCost") -> str:
    from atoll.coordinator.run.text import count

    links = len(cost.stages) - 1
    text = (
        f"A token crosses {links} link{'' if links == 1 else 's'}, with "
        f"{cost.forward_bytes_per_token:.0f} bytes out ({spec.topology.activations}, and its id) "
        f"and {cost.backward_bytes_per_token:.0f} back ({spec.topology.gradients}). At most "
        f"{count(cost.tokens_per_s)} tokens/s in all: {cost.binds.name} binds, by its "
        f"{cost.binds.bound}. A microbatch takes about {cost.way_s:.2g} s there and back."
    )
    if spec.topology.staleness == 0:
        text += (
            f" Each step waits for it (staleness = 0), which leaves about "
            f"{count(cost.waiting_tokens_per_s)} tokens/s; more grad_accumulation loses less."
        )
    return text


def setting_of(args: argparse.Namespace, spec: "RunSpec") -> "Setting":
    """Peers and links as given; an inner step as given, or timed on this machine.

    Raises:
        PlanError: a number is out of range, or the model is too large to be timed.
    """
    from atoll.peer.lab import step_time
    from atoll.peer.lab.plan import LATE_STEPS, Setting

    told = Setting(
        peers=args.peers,
        mbit_s=args.mbit,
        rtt_s=args.rtt_ms / 1000,
        step_s=1.0 if args.step_ms is None else args.step_ms / 1000,
        cores=args.cores,
        late_steps=LATE_STEPS,
    )
    if args.step_ms is not None:
        return told
    timed = step_time.measured(spec, args.device)
    return replace(told, step_s=timed.adamw_s, muon_step_s=timed.muon_s)


def how_timed(args: argparse.Namespace) -> str:
    """Return the origin of the step time, in words."""
    from atoll.peer.lab.step_time import is_busy

    if args.step_ms is not None:
        return "as given"
    busy = ", which is busy; pass --step-ms for its idle value" if is_busy() else ""
    return f"measured on this machine{busy}"


def _heading(args: argparse.Namespace, spec: "RunSpec", setting: "Setting", model: Any) -> str:  # noqa: ANN401 - a module
    how = how_timed(args)
    name = spec.model.title
    plural = "" if setting.peers == 1 else "s"
    return (
        f"{name}, {_params(model) / 1e6:.3g}M parameters; {setting.peers} peer{plural}, "
        f"{setting.mbit_s:g} Mbit/s, {1000 * setting.rtt_s:g} ms; "
        f"a step takes {1000 * setting.step_s:.0f} ms ({how})\n"
    )


def _grown(rounds: int, windows: "Timetable") -> str:
    return (
        f"Windows grow from {windows.window(0)} to {windows.window(rounds - 1)} steps; the table "
        f"assumes their mean of {windows.mean_window(rounds)}. "
        f"{rounds} rounds are {windows.steps_until(rounds):,} steps.\n"
    )


def _params(model: Any) -> int:  # noqa: ANN401 - a module
    from atoll.optim.state.layout import Layout

    return Layout.of(model).numel


def _needs(needs: "Resources") -> str:
    """Return what the run needs of each machine."""
    gb = {name: f"{count / 1e9:.3g} GB" for name, count in asdict(needs).items()}
    on_cpu, on_host, on_cpu_left, on_host_left = (
        f"{needs.host_memory(on_gpu=gpu, state_on_disk=on_disk) / 1e9:.3g} GB"
        for on_disk in (False, True)
        for gpu in (False, True)
    )
    text = (
        f"A peer that trains on its processor needs {on_cpu} of memory at the peak. With a GPU it "
        f"needs {gb['gpu_memory']} there, or at least {gb['gpu_memory_least']} with one sequence "
        f"at a time and activations recomputed, and {on_host} of memory. It needs "
        f"{gb['peer_disk']} of disk, with {gb['peer_disk_free']} "
        f"free beside them. The coordinator needs {gb['coordinator_memory']} of memory and "
        f"{gb['coordinator_disk']} of disk, with {gb['coordinator_disk_free']} free, and "
        f"{gb['coordinator_disk_a_round']} more disk a round. With --outer-state disk, "
        f"{gb['peer_state']} of a peer's memory and {gb['coordinator_state']} of the "
        f"coordinator's are files on the disk, which leaves a peer's at {on_cpu_left}, or "
        f"{on_host_left} with a GPU."
    )
    return textwrap.fill(text, WIDTH) + "\n"


def table(options: "list[RunOption]") -> list[str]:
    """Return a heading and one line per option; the first option is the run's own."""
    head = f"{'':{NAME_WIDTH}}{'':4}{'':7}{'lost':>6}{'com-':>6}{'':7}{'loss':>7}{'same':>7}"
    units = (
        f"{'':{NAME_WIDTH}}{'H':>4}{'MB':>7}{'s':>6}{'puting':>7}{'GB RAM':>7}{'to ddp':>7}"
        f"{'time':>6}"
    )
    own, *others = options
    rest = [option for option in others if _name(option) != _name(own)]
    return [head, units, f"{_line(own)}  this run", *map(_line, rest)]


def _name(option: "RunOption") -> tuple[str, int]:
    return option.method, option.prediction.inner_steps


def _line(option: "RunOption") -> str:
    from atoll.peer.lab.advice import expected

    cost = option.prediction
    gap, at_equal_time = "", ""
    if option.gap is not None:
        gap = f"{100 * option.gap:+.1f}%"
        at_equal_time = f"{100 * (expected(option) - 1):+.1f}%"
    name = option.method
    if len(name) >= NAME_WIDTH:
        name += "\n" + NAME_WIDTH * " "
    note = "" if option.runs else " simulated"
    sent, lost = _figure(cost.sent_bytes / 1e6, 7), _figure(cost.lost_s, 6)
    used, held = 100 * cost.utilisation, _figure(cost.memory_bytes / 1e9, 7)
    return (
        f"{name:{NAME_WIDTH}}{cost.inner_steps:4}{sent}{lost}{used:6.0f}%{held}"
        f"{gap:>7}{at_equal_time:>7}{note}"
    )


def _figure(value: float, width: int) -> str:
    """Format a number, with as many of two decimals as leave a space before it."""
    decimals = next((d for d in (2, 1) if len(f"{value:.{d}f}") < width), 0)
    return f"{value:{width}.{decimals}f}"


def _told(
    args: argparse.Namespace,
    setting: "Setting",
    model: Any,  # noqa: ANN401 - a module
    mine: "RunOption",
    shown: "list[RunOption]",
    chosen: "RunOption",
) -> dict[str, Any]:
    return {
        "params": _params(model),
        "setting": asdict(setting),
        "step_measured": args.step_ms is None,
        "this_run": asdict(mine),
        "options": [asdict(option) for option in shown],
        "recommended": asdict(chosen),
    }
