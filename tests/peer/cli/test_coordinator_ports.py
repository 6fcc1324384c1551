"""What `atoll coordinator` prints of its ports at its start."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.coordinator.ports import Port, Ports
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.cli.coordinator import OnePortError, about_ports, add_parser, with_addresses
from support.organiser import tiny_spec


def up(
    *, is_public: bool, is_behind: bool = False, is_elsewhere: bool = False, **found: Any
) -> Any:
    settings = SimpleNamespace(
        listen="0.0.0.0:7700", dht_listen="0.0.0.0:7701", advertise="run.example.org"
    )
    ports = Ports(grpc=Port(number=7700), p2p=Port(number=7701))
    for name, value in found.items():
        setattr(ports, name, Port(number=getattr(ports, name).number, found=value, by="A"))
    spec = SimpleNamespace(coordinator=settings)
    return SimpleNamespace(
        ports=ports,
        is_public=is_public,
        is_behind=is_behind,
        is_elsewhere=is_elsewhere,
        coordinator=SimpleNamespace(spec=spec),
    )


def test_a_run_without_a_public_address_is_warned() -> None:
    (line,) = about_ports(up(is_public=False))
    assert line.startswith("warning: none of these addresses is public")


def test_a_public_address_that_nobody_has_tried_is_no_warning() -> None:
    assert about_ports(up(is_public=True)) == [
        "no peer has tried ports 7700 and 7701 from outside yet"
    ]


def test_a_cloud_machine_with_a_private_address_is_not_called_wrong() -> None:
    _, line = about_ports(up(is_public=True, is_behind=True))
    assert "warning" not in line
    assert "must forward TCP ports 7700 and 7701 from run.example.org to it" in line


@pytest.mark.parametrize("is_public", [True, False])
def test_an_address_of_another_machine_is_a_warning(is_public: bool) -> None:
    told = about_ports(up(is_public=is_public, is_elsewhere=True))
    assert sum("run.example.org is no address of this machine" in line for line in told) == 1


def test_what_joiners_found_comes_before_what_addresses_suggest() -> None:
    (line,) = about_ports(up(is_public=False, is_behind=True, grpc="reached", p2p="reached"))
    assert "ports 7700 and 7701 were reached from outside" in line


def test_a_closed_port_is_a_warning_with_what_to_forward() -> None:
    (line,) = about_ports(up(is_public=True, is_behind=True, grpc="reached", p2p="closed"))
    assert line.startswith("warning: found by joiners so far: A reached port 7700")
    assert "forward TCP port 7701" in line


def spec_for(*arguments: str) -> RunSpec:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return with_addresses(
        tiny_spec(coordinator={}), parser.parse_args(["coordinator", "R", *arguments])
    )


def test_one_port_puts_the_node_at_the_port_of_grpc() -> None:
    settings = spec_for("--one-port", "--listen", "0.0.0.0:7710").coordinator
    assert settings.listen == settings.dht_listen == "0.0.0.0:7710"


@pytest.mark.parametrize(
    ("more", "remedy"),
    [(("--dht-listen", "0.0.0.0:1"), "omit one"), (("--listen", "0.0.0.0:0"), "pass --listen")],
)
def test_one_port_that_cannot_be_is_refused(more: tuple[str, str], remedy: str) -> None:
    with pytest.raises(OnePortError, match=remedy):
        spec_for("--one-port", *more)
