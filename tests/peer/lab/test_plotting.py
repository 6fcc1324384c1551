import itertools
import math
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.lab.plotting import LossPlot, draw_loss, spread

FALLING = [(r, 5 / r + 1) for r in range(1, 9)]


def size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


def test_a_full_plot_is_a_png(tmp_path):
    plot = LossPlot(
        title="run",
        subtitle="nano",
        peers={f"p{i}": FALLING for i in range(10)},
        run=FALLING,
        valid=FALLING[::2],
        compared={"baseline": FALLING, "alone": FALLING[3:]},
        marks={"killed": 3, "back": 4},
    )
    draw_loss(plot, tmp_path / "loss.png")
    assert size(tmp_path / "loss.png") == (1440, 810)


@pytest.mark.parametrize(
    "points", [[], [(1, 2.0)], [(1, math.nan)], [(1, 2.0), (2, math.inf), (3, 1.0)]]
)
def test_short_and_broken_curves_are_drawn(tmp_path, points):
    plot = LossPlot(
        title="run", run=points, valid=points, peers={"p": points}, compared={"b": points}
    )
    draw_loss(plot, tmp_path / "loss.png")
    assert size(tmp_path / "loss.png") == (1440, 810)


def test_drawing_leaves_pyplot_alone(tmp_path):
    script = (
        "import sys; from pathlib import Path;"
        "from atoll.peer.lab.plotting import LossPlot, draw_loss;"
        f"draw_loss(LossPlot(title='run'), Path({str(tmp_path / 'a.png')!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_heights_that_do_not_touch_stay():
    assert spread([0.1, 0.3, 0.9], gap=0.05) == [0.1, 0.3, 0.9]


def test_equal_heights_are_centred():
    assert spread([0.5, 0.5, 0.5], gap=0.1) == pytest.approx([0.4, 0.5, 0.6])


@given(st.lists(st.floats(0, 1), max_size=8))
def test_spread_heights_never_touch_and_keep_their_mean(heights):
    found = spread(sorted(heights), gap=0.1)
    assert all(b - a > 0.1 - 1e-9 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(heights), abs=1e-9)
