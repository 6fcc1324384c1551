import pytest
import sizes_windows
import torch
from sizes_windows import long_steps

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.vectors import LEAST_WINDOW_NS_PER_VALUE, LEAST_WINDOW_S


@pytest.mark.parametrize("params", [10_700_000, 103_000_000, 1_000_000_000])
@pytest.mark.parametrize("ns", [2.0, 12.0, 500.0])
def test_windows_are_long_enough_for_memory_to_go_back(params, ns):
    window_s = long_steps(params, ns) * 1e-9 * ns * params
    assert window_s >= 1.5 * max(LEAST_WINDOW_S, 1e-9 * LEAST_WINDOW_NS_PER_VALUE * params)
    assert long_steps(params, ns) >= 2


def test_a_step_is_timed_a_parameter(monkeypatch):
    timed = sizes_windows.step_time.StepTime(adamw_s=0.5, muon_s=9.0)
    monkeypatch.setattr(sizes_windows.step_time, "measured", lambda spec, device: timed)
    monkeypatch.setattr(sizes_windows, "bare_model", lambda spec: torch.nn.Linear(9, 10))
    assert sizes_windows.step_ns(RunSpec()) == pytest.approx(5e6)
