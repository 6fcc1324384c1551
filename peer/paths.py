"""Paths of all state that outlives a process.

    $XDG_STATE_HOME/atoll/                  (~/.local/state/atoll if the variable is not set)
      peers/RUN_ID/                         state of one peer in one run: `PeerPaths`
        identity.key                          key pair; the PeerID follows from it
        run.json                              the run that this directory belongs to
        consent.json                          the owner's yes to what the run asks for
        ballots.json                          where a keeper may have voted
        tokenizer.json                        the run's tokenizer, if it travelled with the run
        reach.json                            whether others can dial this peer
        log/                                  the last updates and snapshots
        trainer.safetensors                   inner optimizer, data position, feedback, open window
        trainer.SAVE.RANK.safetensors         the shards of it that other ranks keep
        trainer.RANK.fit.safetensors          the part of a batch that was too much for a rank
        stage-1/, stage-1.safetensors         the same of a stage, in a pipeline; those of a former
                                              stage are deleted once the new one is served
        lock                                  held while a peer runs here
        atoll.log                             the daemon's messages
      texts/RUN_ID/                         key and tokenizer of `atoll sample INVITE`
      followers/RUN_ID/                     state of `atoll follow INVITE`: a peer's, and the log,
                                            records and checkpoints as a coordinator's
        peers/stage-2/                        of a pipeline: the peers that follow further stages
      coordinators/RUN_NAME/                state of one coordinator: `coordinator_state_dir`
      viewer.key                            by which this user is known again as an observer

`atoll.coordinator` defines the files in a coordinator's directory.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all state; ignore a relative XDG_STATE_HOME, as XDG requires."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "atoll"


def peer_state_dir(run_id: str, *, home: Path | None = None) -> Path:
    """Return the default state directory of this machine's peer in a run."""
    return (home or state_home()) / "peers" / run_id


def text_state_dir(run_id: str, *, home: Path | None = None) -> Path:
    """Return the directory of what this machine needs to ask a run for text."""
    return (home or state_home()) / "texts" / run_id


def follower_dir(run_id: str, *, home: Path | None = None) -> Path:
    """Return the default folder of this machine's follower of a run."""
    return (home or state_home()) / "followers" / run_id


def viewer_file(*, home: Path | None = None) -> Path:
    """Return the file of the secret by which this user is known again as an observer."""
    return (home or state_home()) / "viewer.key"


def coordinator_state_dir(run_name: str, *, home: Path | None = None) -> Path:
    """Return the default state directory of the coordinator of a run with this name."""
    return (home or state_home()) / "coordinators" / run_name


@dataclass(frozen=True, kw_only=True)
class PeerPaths:
    """Paths of the files of one peer in one run, all under `root`."""

    root: Path
    """The peer's state directory; peers never share one."""
    logs: Path | None = None
    """Where the logs lie, if not under `root`: the peers of one follower share that folder."""

    @property
    def identity(self) -> Path:
        """Key pair that determines the PeerID."""
        return self.root / "identity.key"

    @property
    def run(self) -> Path:
        """Record of the run that this directory belongs to."""
        return self.root / "run.json"

    @property
    def reach(self) -> Path:
        """Record of whether others could dial this peer."""
        return self.root / "reach.json"

    @property
    def consent(self) -> Path:
        """Owner's yes to what the run asks for."""
        return self.root / "consent.json"

    @property
    def tokenizer(self) -> Path:
        """Tokenizer that travelled with the run."""
        return self.root / "tokenizer.json"

    @property
    def ballots(self) -> Path:
        """Furthest place at which a keeper may have voted."""
        return self.root / "ballots.json"

    def log(self, module: str = "") -> Path:
        """Directory of the bounded log of a module's updates and snapshots."""
        return (self.logs or self.root) / (module or "log")

    def trainer(self, module: str = "") -> Path:
        """Trainer's state of a module, as far as the log does not give it."""
        return self.root / f"{module or 'trainer'}.safetensors"

    @property
    def lock(self) -> Path:
        """Lock that a peer holds while it runs on this directory."""
        return self.root / "lock"

    @property
    def messages(self) -> Path:
        """File of the daemon's messages."""
        return self.root / "atoll.log"
