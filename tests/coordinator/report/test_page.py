"""The page about a run."""

import base64
import re
from dataclasses import replace

from atoll.coordinator.report.page import MAX_EVENTS, MAX_PEERS, page
from atoll.coordinator.run.status import Event
from support.status import START, make_peer, make_status

HOSTILE = '<script>alert("x")</script>\x1b[2J'


def cells(html):
    return re.findall(r"<td[^>]*>(.*?)</td>", html)


def test_the_page_tells_figures_peers_and_events():
    status = make_status(40, num_peers=3)
    html = page(status, status.history)
    assert "<h1>python-1m</h1>" in html
    assert "<dd>40 of 120</dd>" in html
    assert {"basalt", "coral", "drift"} <= set(cells(html))
    assert any("re-reduced" in cell for cell in cells(html))
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html)
    assert len(pictures) == 5
    assert all(b"<svg" in base64.b64decode(picture) for picture in pictures)


def test_nothing_that_others_wrote_can_run_or_load():
    status = make_status(3, num_peers=2)
    peers = [replace(peer, name=HOSTILE, device=HOSTILE) for peer in status.peers]
    events = [Event(at=START, level="error", source=HOSTILE, text=HOSTILE)]
    html = page(replace(status, run_name=HOSTILE, peers=peers, events=events), status.history)
    assert "<script" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:)", html)
    assert "default-src 'none'" in html


def test_warnings_stay_when_there_are_too_many_events():
    status = make_status(3)
    events = [Event(at=START + i, text=f"told {i}") for i in range(2 * MAX_EVENTS)]
    events[0] = replace(events[0], level="warning", text="early warning")
    html = page(replace(status, events=events), status.history)
    assert html.count("told ") == MAX_EVENTS - 1
    assert "early warning" in html


def test_too_many_peers_are_counted():
    peers = [make_peer(i, position=3) for i in range(MAX_PEERS + 2)]
    html = page(replace(make_status(3), peers=peers), [])
    assert "2 more." in html
    assert "Too few rounds to plot." in html
