"""`atoll simulate`: what is wrong is refused before it trains."""

from support.commands import refused


def test_a_simulation_with_nowhere_to_draw_is_refused_before_it_trains(atoll, tmp_path):
    assert "nowhere/a.png" in refused(atoll("simulate", "--plot", "nowhere/a.png"))
    assert not (tmp_path / "simulation").exists()
