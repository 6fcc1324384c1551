"""Events of the coordinator and of peers: each has a code, and docs/events.md has each code."""

import re
from pathlib import Path

from atoll.coordinator import notices as of_coordinator
from atoll.coordinator.run.notice import CODES, fields_of
from atoll.optim.log.mending import Damage
from atoll.optim.log.orders import Order, SetCodec, StopRun
from atoll.peer import notices as of_peers
from atoll.peer.rounds import notices as of_rounds

ROOT = Path(__file__).parents[2]
LEVELS = "info|warning|error|stopped|ready|round"


def rows():
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    for code, fields, meaning in re.findall(r"^\| `(\S+)` \|([^|]*)\|([^|]+)\|$", page, re.M):
        yield code, re.findall(r"`(\w+)`", fields), meaning.strip()


def test_the_page_lists_each_code_once_with_its_fields_and_meaning():
    assert of_peers and of_rounds  # their codes are registered
    listed = [(code, fields) for code, fields, _ in rows()]
    assert sorted(listed) == sorted((code, fields_of(code)) for code in CODES)
    assert all(meaning for _, _, meaning in rows())


def uncoded(source):
    """Return the calls that report a plain text."""
    return re.findall(rf'\w\(\s*"(?:{LEVELS})",\s*f?".*', source)


def test_no_event_is_without_a_code():
    found = [
        f"{path.relative_to(ROOT)}: {call}"
        for folder in ("coordinator", "peer")
        for path in (ROOT / folder).rglob("*.py")
        for call in uncoded(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_plain_text_is_found():
    assert len(uncoded('self._report("info", "so")\n\nx.tell(\n  "warning",\n  f"{a}")')) == 2
    assert uncoded('self._report("info", notices.left())') == []


def test_sentences_follow_from_the_fields():
    order = Order(run_id=bytes(32), number=3, change=SetCodec(value="int4"))
    decided = of_coordinator.decided(order, 7)
    assert decided == "round 7: order 3: the codec is int4 from here on"
    assert decided.fields == {"round": 7, "number": 3, "change": "codec", "value": "int4"}
    stop = of_coordinator.given(Order(run_id=bytes(32), number=4, change=StopRun(after_round=9)))
    assert stop.fields == {"number": 4, "change": "stop", "value": "9"}
    damage = Damage(entries=2, entries_from=4, bodies=[1, 2])
    damaged = of_coordinator.of_damage(damage)
    assert damaged == str(damage)
    assert (damaged.fields["updates"], damaged.fields["first_state"]) == (["1", "2"], False)
    told = dict(epoch=2, position=5, electors=1, role="keeper", cause="keepers_changed")
    opened = of_coordinator.epoch_opened(**told, came=1, went=2)
    assert opened == (
        "epoch 2 opened at position 5 with 1 keeper: 1 keeper joined, 2 keepers evicted"
    )
    assert of_peers.stopped().fields == {}
    assert of_peers.stopped(reason="why") == "left the run: why"
