"""A tiny model of the Llama family as a folder of weights, runs that begin with it, checkpoints."""

import json

import torch
from safetensors.torch import save_file

from atoll.coordinator.checkpoints import Checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.training.hf import llama
from atoll.peer.training.hf.beginning import with_shape
from atoll.peer.training.models import Decoder, ModelConfig
from atoll.peer.training.opening import first_state
from atoll.peer.training.permission import Allowed

SHAPE = ModelConfig(
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=48,
    vocab_size=260,
    max_seq_len=64,
    tied=False,
    rope_theta=5_000.0,
    norm_eps=1e-6,
)


def write_folder(path, shape=SHAPE, *, seed=0, dtype=torch.float32, **config):
    """Write fresh weights as a folder of Hugging Face; return the decoder that holds them."""
    torch.manual_seed(seed)
    model = Decoder(shape)
    with torch.no_grad():
        for param in model.parameters():  # norms too: ones would hide a mix-up
            param.copy_((param + 0.1 * torch.randn_like(param)).to(dtype))
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: each.to(dtype).contiguous().clone()
        for name, each in llama.state_dict_of(model).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(llama.config_of(shape) | config))
    return model


def spec_of(init=None, **sections):
    plain = {
        "run": {"rounds": 3, "seed": 3},
        "model": {} if init is None else {"init": str(init)},
        "data": {"seq_len": 16},
        "inner": {"batch_size": 4, "warmup_steps": 1, "lr": 0.01},
        "outer": {"inner_steps": 2},
    }
    for name, fields in sections.items():
        plain[name] = plain.get(name, {}) | fields
    return with_shape(RunSpec.from_dict(plain))


def checkpoint_of(spec, state=None):
    """A checkpoint of a run, by default of its beginning."""
    state = state or first_state(spec, Allowed.everything_in(spec))
    return Checkpoint(
        spec=spec, run_id=b"r" * 16, epoch=0, position=state.position, chain=bytes(32), state=state
    )
