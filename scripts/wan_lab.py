#!/usr/bin/env python3
"""Run a command on several internet hosts of one machine: real bandwidth, delay, loss and NATs.

    wan_lab.py --hosts 4 --rate 100 --rtt 50 -- python worker.py {host} {ip}
    wan_lab.py --hosts 3 --behind symmetric -- python worker.py {host} {ip0}

{host} is the host's number, {ip} the address at which others see it, {ip0} that of the first host,
which no router hides. Needs root and /dev/net/tun; see `atoll.dht.testing.wan`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from atoll.dht.testing.nat import KINDS
from atoll.dht.testing.wan import WanLab, WanLink


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="number of hosts (default %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=100.0, help="up and down, Mbit/s")
    parser.add_argument("--rtt", type=float, default=50.0, help="ms between any two hosts")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of packets")
    parser.add_argument(
        "--behind",
        choices=("", *KINDS, "double"),
        default="",
        help="kind of the router in front of every host but the first (default: none)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("expected a command after --")
    link = WanLink(args.rate, args.rate, args.rtt / 2, args.loss)
    links = [replace(link, behind=args.behind if i else "") for i in range(args.hosts)]
    with WanLab(links) as lab:
        code = run_everywhere(lab, command)
        megabytes = [round(sent / 1e6, 2) for sent in lab.sent]
        print(
            f"wan_lab: MB sent per host {megabytes} dropped packets {lab.dropped}", file=sys.stderr
        )
    return code


def run_everywhere(lab: WanLab, command: Sequence[str]) -> int:
    """Run the command on every host, with its number and addresses filled in; the worst code."""
    processes = []
    for i in range(len(lab.links)):
        known = {"{host}": str(i), "{ip}": lab.ip(i), "{ip0}": lab.ip(0)}
        processes.append(lab.popen(i, [fill(word, known) for word in command]))
    return max(process.wait() for process in processes)


def fill(word: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word


if __name__ == "__main__":
    sys.exit(main())
