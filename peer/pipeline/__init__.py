"""Pipelines: a model in stages, and microbatches that peers push from stage to stage.

`Hop` is the machine of one peer, which a `Carrier` connects to the network and the trainer;
`placement` decides which stage a peer serves. The package loads a module with its first use.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.pipeline.carrier import Carrier
    from atoll.peer.pipeline.hop import Hop
    from atoll.peer.pipeline.passes import HopRules
    from atoll.peer.pipeline.workbench import Workbench

__all__ = ["Carrier", "Hop", "HopRules", "Workbench"]

__getattr__ = exports(
    __name__,
    {"Carrier": "carrier", "Hop": "hop", "HopRules": "passes", "Workbench": "workbench"},
)
