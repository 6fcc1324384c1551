"""The checks of `atoll doctor`: this machine (`health`), and its way to a run (`run_checks`)."""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.daemon.doctor.health import Finding
    from atoll.peer.daemon.doctor.run_checks import check_run

__all__ = ["Finding", "check_run"]

__getattr__ = exports(__name__, {"Finding": "health", "check_run": "run_checks"})
