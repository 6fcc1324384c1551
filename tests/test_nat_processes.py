"""Peers behind home routers train together, and nobody opens a port: real processes in the lab."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.coordinator.run.spec import RunSpec, template
from atoll.dht.testing.wan import WanLab, WanLink
from support.limits import DEADLINE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,  # the same routers, without runs: tests/dht/test_punching.py
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"
    ),
]

ATOLL = (sys.executable, "-m", "atoll.peer.cli.main")


ROUND = re.compile(r"  round +(\d+) .*  (\d+) peers?\b")


def write_spec(folder: Path, public: str, *, rounds: int = 4, min_peers: int = 2) -> Path:
    (folder / "text.txt").write_text("Peers behind routers train, and nobody opens a port. " * 2000)
    spec = RunSpec.from_dict(
        {
            "run": {"name": "home", "rounds": rounds},
            "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}},
            "data": {"source": str(folder / "text.txt"), "seq_len": 32},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "outer": {"inner_steps": 4},
            "round": {"min_peers": min_peers, "stall_s": 5.0},
            "coordinator": {"advertise": public},
        }
    )
    path = folder / "RUN.toml"
    path.write_text(template(spec))
    return path


def until(condition, folder):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, words(folder)
        time.sleep(0.1)


def words(folder):
    return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.log"))


def rounds_of(folder, num_peers, after=0):
    """Return the rounds of so many peers that the coordinator has printed."""
    found = ROUND.findall((folder / "coordinator.log").read_text())
    return [int(n) for n, peers in found if int(peers) == num_peers and int(n) > after]


def newest(folder):
    return max((int(n) for n, _ in ROUND.findall((folder / "coordinator.log").read_text())))


@pytest.mark.timeout(480)
def test_a_run_at_one_port_outlasts_a_move_and_the_death_of_a_relay(tmp_path):
    """Two peers are behind routers between which no hole works; the third relays for them."""
    invite, children = tmp_path / "invite", {}
    kinds = ("", "double", "symmetric", "")
    with WanLab([WanLink(behind=kind) for kind in kinds]) as lab:

        def start(host, name, *arguments):
            with (tmp_path / f"{name}.log").open("w") as log:
                words_of_it = [*ATOLL, *map(str, arguments)]
                children[name] = lab.popen(
                    host, words_of_it, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

        def said(name, text):
            return text in (tmp_path / f"{name}.log").read_text()

        try:
            spec = write_spec(tmp_path, lab.ip(0), rounds=0, min_peers=3)
            state = ("--state-dir", tmp_path / "state", "--invite-file", invite)
            start(0, "coordinator", "coordinator", spec, "--one-port", *state)
            until(invite.exists, tmp_path)
            for host, name in enumerate(("ann", "ben", "cy"), 1):
                options = ("--yes", "--data", tmp_path / "text.txt", "--device", "cpu")
                options += ("--name", name, "--state-dir", tmp_path / name)
                start(host, name, "peer", invite, *options)
            until(lambda: rounds_of(tmp_path, 3), tmp_path)
            # A relay is named once its record was seen.
            until(lambda: all(said(n, "relays of this peer") for n in ("ann", "ben")), tmp_path)
            lab.readdress(1)
            moved = newest(tmp_path)
            # The round that the move strikes may count without the peer that moved.
            until(lambda: rounds_of(tmp_path, 3, after=moved + 1), tmp_path)
            for each in psutil.Process(children["cy"].pid).children(recursive=True):
                each.kill()  # its network process, which would say goodbye
            children["cy"].kill()
            killed = newest(tmp_path)
            until(lambda: rounds_of(tmp_path, 2, after=killed + 1), tmp_path)
            for name in ("ann", "ben"):
                children[name].terminate()
            assert [children[name].wait(60) for name in ("ann", "ben")] == [0, 0], words(tmp_path)
        finally:
            for child in children.values():
                child.terminate()
            for child in children.values():
                child.wait(20)


def test_peers_behind_two_kinds_of_routers_make_every_round(tmp_path):
    invite = tmp_path / "invite"
    children = []
    with WanLab([WanLink(), WanLink(behind="port-restricted"), WanLink(behind="symmetric")]) as lab:

        def start(host, name, *arguments):
            with (tmp_path / f"{name}.log").open("w") as log:
                words_of_it = [*ATOLL, *map(str, arguments)]
                child = lab.popen(
                    host, words_of_it, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            children.append(child)
            return child

        try:
            spec = write_spec(tmp_path, lab.ip(0))
            state = ("--state-dir", tmp_path / "state", "--invite-file", invite)
            start(0, "coordinator", "coordinator", spec, *state)
            until(invite.exists, tmp_path)
            options = ("--yes", "--data", tmp_path / "text.txt", "--device", "cpu", "--share", 0.3)
            peers = [
                start(host, name, "peer", invite, *options, "--state-dir", tmp_path / name)
                for host, name in ((1, "ann"), (2, "ben"))
            ]
            until(lambda: all(peer.poll() is not None for peer in peers), tmp_path)
            assert [peer.returncode for peer in peers] == [0, 0], words(tmp_path)
            asked = [*ATOLL, "status", str(invite), "--json"]
            with lab.popen(0, asked, stdout=subprocess.PIPE) as child:
                status = json.loads(child.communicate(timeout=60)[0])
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(20)
    assert (status["state"], status["position"]) == ("finished", 4)
    assert [row["members"] for row in status["history"]] == [2] * 4
    assert [peer["reach"] for peer in status["peers"]] == ["relayed"] * 2
    assert all(peer["relayed_bytes"] > 10_000 for peer in status["peers"])
    for name in ("ann", "ben"):
        said = (tmp_path / f"{name}.log").read_text()
        assert "a router refuses connections" in said
        assert json.loads((tmp_path / name / "reach.json").read_text())["is_dialed"] is False
