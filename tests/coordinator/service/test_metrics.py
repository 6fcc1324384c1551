"""The board in docs/ asks Prometheus for what the endpoints have, in words that it understands."""

import json
import re
from dataclasses import replace
from pathlib import Path

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from atoll.coordinator.service.metrics import Metrics
from support.status import make_status

BOARD = Path(__file__).parents[3] / "docs" / "deploy" / "grafana.json"


def asked():
    """Return the board's expressions, with its variables as Grafana fills them in."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            label_values = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            found.append(f"count by ({label_values[2]}) ({label_values[1]})")
    return [expression.replace("$peer", ".*") for expression in found]


def selectors(node):
    """Yield the selectors of series in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    for name in ("expr", "lhs", "rhs"):
        yield from selectors(getattr(node, name)) if hasattr(node, name) else ()
    for argument in getattr(node, "args", ()):
        yield from selectors(argument)


@pytest.fixture(scope="module")
def exported():
    """The labels of each series that a run's endpoint has, by name."""
    registry = CollectorRegistry()
    status = make_status()
    peers = [replace(p, reach="direct", time_shares={"train": 0.9}) for p in status.peers]
    Metrics(registry).update(replace(status, peers=peers))
    families = registry.collect()
    return {sample.name: set(sample.labels) for f in families for sample in f.samples}


@pytest.mark.parametrize("expression", asked())
def test_the_board_asks_for_series_that_are_exported(expression, exported):
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for selector in found:
        assert {matcher.name for matcher in selector.matchers.matchers} <= exported[selector.name]


def test_the_board_groups_by_labels_that_there_are(exported):
    for expression in asked():
        parsed = promql_parser.parse(expression)
        if isinstance(parsed, promql_parser.AggregateExpr):
            (selector,) = selectors(parsed.expr)
            assert set(parsed.modifier.labels) <= exported[selector.name]


def test_panels_do_not_cover_one_another():
    cells = set()
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24  # of a row
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells
                cells.add((x, y))
