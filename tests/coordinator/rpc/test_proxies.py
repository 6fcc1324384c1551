"""A network that requires a proxy: connections use none, and errors name it."""

import asyncio

import pytest

from atoll.coordinator.rpc import tls
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.rpc.messages import CHANNEL_OPTIONS
from atoll.coordinator.rpc.proxies import remedy
from atoll.peer.daemon.doctor import health

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ["https_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_proxy_is_named_for_a_host_of_the_internet_alone(settings, name):
    assert remedy("run.example.org") == ""
    settings.setenv(name, "http://proxy:3128")
    for host in ("run.example.org", "203.0.114.1", "2a00::1"):
        assert remedy(host).startswith(f"{name.lower()} is set: ")
    for host in ("192.168.1.4", "127.0.0.1", "::1", "localhost"):
        assert remedy(host) == ""
    settings.setenv("no_proxy", ".example.org")
    assert remedy("run.example.org") == ""


def test_an_unreachable_coordinator_gets_the_proxy_as_remedy(settings):
    def refused(address):
        raise ConnectionRefusedError

    settings.setattr(tls, "_peer_certificate", refused)
    settings.setenv("https_proxy", "http://proxy:3128")
    with pytest.raises(CoordinatorUnreachable, match="use another network or a VPN"):
        asyncio.run(tls.pinned_certificate("203.0.114.1:7700", b"", timeout_s=1.0))
    with pytest.raises(CoordinatorUnreachable, match="ask the organiser"):
        asyncio.run(tls.pinned_certificate("127.0.0.1:7700", b"", timeout_s=1.0))


def test_the_doctor_names_the_proxy(settings):
    async def silent(host, port):
        return False

    settings.setattr(health, "answers", silent)
    settings.setenv("https_proxy", "http://proxy:3128")
    finding = asyncio.run(health.port_finding("coordinator", [("203.0.114.1", 7700)]))
    assert finding.health is health.Health.PROBLEM
    assert "https_proxy is set" in finding.remedy and "outbound TCP" in finding.remedy
    finding = asyncio.run(health.port_finding("coordinator", [("192.168.1.4", 7700)]))
    assert "ask the organiser" in finding.remedy


def test_no_call_goes_through_a_proxy():
    assert ("grpc.enable_http_proxy", 0) in CHANNEL_OPTIONS
