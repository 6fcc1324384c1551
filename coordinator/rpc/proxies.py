"""Networks that let nothing out but through an HTTP proxy: a run cannot work in them.

Peers talk to each other over TCP connections of their own, in both directions. So no connection of
ours uses a proxy, and when one fails while a proxy is set, that is the likeliest cause.
"""

from __future__ import annotations

import urllib.request

from atoll.dht.addresses import is_public


def remedy(host: str) -> str:
    """Return what to do if a host cannot be reached and a proxy is set for it; else nothing."""
    found = urllib.request.getproxies()
    name = next((f"{kind}_proxy" for kind in ("https", "http", "all") if found.get(kind)), "")
    if not name or not is_public(host) or host == "localhost" or urllib.request.proxy_bypass(host):
        return ""
    return (
        f"{name} is set: if this network requires a proxy, the run's ports cannot be "
        "reached from it; use another network or a VPN, or ask for outbound TCP to ports 7700-7701"
    )
