"""Where Atoll keeps what outlives a process: every path in one file.

    $XDG_STATE_HOME/atoll/                  (~/.local/state/atoll where the variable is not set)
      peers/RUN_ID/                         one peer in one run: `PeerPaths`
        identity.key                          key pair; the PeerID follows from it
        run.json                              the run that this directory belongs to, as joined
        log/                                  the last updates and snapshots
        trainer.safetensors                   parameters, inner optimizer, data position, feedback
        lock                                  held while a peer runs here
        atoll.log                             what the daemon said
      coordinators/RUN_NAME/                one coordinator: `coordinator_state_dir`

What lies inside a coordinator's directory is the business of `atoll.coordinator`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all state; a relative XDG_STATE_HOME is ignored, as XDG asks."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "atoll"


def peer_state_dir(run_id: str, *, home: Path | None = None) -> Path:
    """Return the default state directory of this machine's peer in a run."""
    return (home or state_home()) / "peers" / run_id


def coordinator_state_dir(run_name: str, *, home: Path | None = None) -> Path:
    """Return the default state directory of the coordinator of a run of this name."""
    return (home or state_home()) / "coordinators" / run_name


@dataclass(frozen=True, kw_only=True)
class PeerPaths:
    """The files of one peer in one run, all under `root`."""

    root: Path
    """The peer's state directory; no two peers share one."""

    @property
    def identity(self) -> Path:
        """The key pair that the PeerID follows from."""
        return self.root / "identity.key"

    @property
    def run(self) -> Path:
        """Which run this directory belongs to."""
        return self.root / "run.json"

    @property
    def log(self) -> Path:
        """The directory of the bounded log of updates and snapshots."""
        return self.root / "log"

    @property
    def trainer(self) -> Path:
        """The trainer's state: parameters, inner optimizer, data position, feedback."""
        return self.root / "trainer.safetensors"

    @property
    def lock(self) -> Path:
        """Held while a peer runs on this directory."""
        return self.root / "lock"

    @property
    def messages(self) -> Path:
        """What the daemon said."""
        return self.root / "atoll.log"
