"""The run's shared vocabulary: spec, invite, admissions, keys, status records, and text from them.

Peers and the coordinator both use it. `invite` and `status` load no torch; `spec` does, which needs
it through the methods. So the package loads a module with its first use.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.run.invite import Invite, InviteError
    from atoll.coordinator.run.keys import RunKeys
    from atoll.coordinator.run.spec import RunSpec
    from atoll.coordinator.run.spec_problems import SpecError
    from atoll.coordinator.run.status import RunStatus

__all__ = ["Invite", "InviteError", "RunKeys", "RunSpec", "RunStatus", "SpecError"]

__getattr__ = exports(
    __name__,
    {
        "Invite": "invite",
        "InviteError": "invite",
        "RunKeys": "keys",
        "RunSpec": "spec",
        "RunStatus": "status",
        "SpecError": "spec_problems",
    },
)
