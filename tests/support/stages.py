"""Checkpoints of a pipeline, as its coordinator writes them: a folder a stage."""

import torch

from atoll.coordinator.checkpoints import Checkpoint, save_checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.module import log_id
from atoll.optim.state.outer_state import OuterState
from atoll.peer.training.opening import first_state
from atoll.peer.training.permission import Allowed

RUN_ID = b"r" * 32


def staged_spec(stages=3, **sections):
    plain = {
        "run": {"name": "reef", "seed": 3},
        "model": {"overrides": {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}},
        "data": {"seq_len": 16},
        "inner": {"batch_size": 2},
        "topology": {"stages": stages},
    }
    for name, fields in sections.items():
        plain[name] = plain.get(name, {}) | fields
    return RunSpec.from_dict(plain)


def trained_states(spec, position=4):
    """A state a stage, as if trained: other values than those with which the run begins."""
    generator = torch.Generator().manual_seed(position)
    states = {}
    for module in spec.modules:
        begun = first_state(spec, Allowed.everything_in(spec), module=module)
        states[module] = state = OuterState.blank(begun.layout, position)
        noise_N = torch.randn(begun.layout.numel, generator=generator)
        state.params_N.copy_(begun.params_N + 0.05 * noise_N)
        state.momentum_N.copy_(noise_N)
    return states


def save_stage(folder, spec, module, state, *, file=None, moment=()):
    """Write one stage's checkpoint; return its path."""
    path = folder / module / (file or f"{spec.run.name}-{state.position:08d}.safetensors")
    checkpoint = Checkpoint(
        spec=spec,
        run_id=log_id(RUN_ID, module),
        epoch=1,
        position=state.position,
        chain=bytes([state.position]) * 32,
        state=state,
        moment=dict(moment),
    )
    save_checkpoint(path, checkpoint)
    return path


def save_stages(folder, spec, *positions):
    """Write the checkpoints of all stages; return the states of the last position."""
    states = {}
    for position in positions:
        states = trained_states(spec, position)
        for module, state in states.items():
            save_stage(folder, spec, module, state)
    return states


def save_moment(folder, spec, positions):
    """Write the checkpoints of one moment, each stage at its position; return their states."""
    moment = dict(zip(spec.modules, positions, strict=True))
    states = {name: trained_states(spec, at)[name] for name, at in moment.items()}
    for module, state in states.items():
        save_stage(folder, spec, module, state, moment=moment)
    return states
