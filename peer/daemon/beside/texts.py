"""Serving texts from the network process, which holds the synced parameters.

A text is computed there, so that it never takes the trainer's interpreter lock. The stage is built
a second time, without values of its own; a custom model is imported if the owner has named it, by
the paths of the program that the owner has started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.pipeline_run import PipelineRun
from atoll.peer.inference.served import ServedStage
from atoll.peer.training.opening import slices_by_stage, slices_of
from atoll.peer.training.permission import Allowed


def open_texts(run: PipelineRun, told: Mapping[str, Any]) -> None:
    """Compute texts of clients from now on.

    Args:
        run: of this peer.
        told: `spec`, `module`, `vocab_size` and `share`; `models` and `any_source`, as the owner
            allows them; and the `path` by which the trainer imports.

    Raises:
        ModelError: the stage cannot continue a text.
    """
    spec, vocab_size = RunSpec.from_json(told["spec"]), told["vocab_size"]
    allowed = Allowed(models=frozenset(told["models"]), any_source=told["any_source"])
    sys.path[:] = told["path"]
    known = slices_of(spec, vocab_size, allowed)
    slices = slices_by_stage(spec, known)[told["module"]]
    stage = ServedStage(known.build(slices, seed=spec.run.seed), known.num_logits)
    stage.expect_extends(run.replica.state.params_N)
    run.serve_texts(stage, told["share"])
