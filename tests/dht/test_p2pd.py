import pytest

from atoll.dht import p2pd
from atoll.dht.p2pd import P2pdOptions, command, parse_address


def test_loopback_nodes_ask_nothing_of_the_router(tmp_path):
    near = command(tmp_path / "d", tmp_path / "k", P2pdOptions())
    far = command(tmp_path / "d", tmp_path / "k", P2pdOptions(listen=("/ip4/0.0.0.0/tcp/1",)))
    assert "-natPortMap=0" in near
    assert "-natPortMap=0" in far  # nobody would be told what p2pd's own mapping is


def test_ports_that_were_found_are_kept_over_a_restart():
    found = ["/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/4001"]
    assert p2pd._with_ports(("/ip4/0.0.0.0/tcp/0",), found) == ("/ip4/0.0.0.0/tcp/4001",)
    both = [*found, "/ip6/::1/tcp/4002"]
    assert p2pd._with_ports(("/ip6/::/tcp/0",), both) == ("/ip6/::/tcp/4002",)
    assert p2pd._with_ports(("/ip4/127.0.0.1/tcp/0",), found) == ("/ip4/127.0.0.1/tcp/4001",)
    assert p2pd._with_ports(("/ip4/127.0.0.1/tcp/7",), found) == ("/ip4/127.0.0.1/tcp/7",)


@pytest.mark.parametrize("address", ["", "nonsense", "/ip4/300.1.1.1/tcp/1", "/ip4/1.2.3.4/tcp/x"])
def test_a_broken_address_is_a_value_error(address):
    with pytest.raises(ValueError, match="multiaddr"):
        parse_address(address)
