"""A tiny pipeline that trains in fp32, and endless text for it."""

import torch

from atoll.coordinator.run.spec import RunSpec

VOCAB = 64


def spec_of(stages=3, accumulation=2, clip_norm=0.0, **topology):
    return RunSpec.from_dict(
        {
            "model": {
                "overrides": {
                    "dim": 16,
                    "num_layers": 3,
                    "num_heads": 2,
                    "ffn_dim": 32,
                    "vocab_size": VOCAB,
                }
            },
            "data": {"seq_len": 12},
            "inner": {
                "batch_size": 2,
                "grad_accumulation": accumulation,
                "warmup_steps": 2,
                "lr": 1e-2,
                "clip_norm": clip_norm,
            },
            "topology": {"stages": stages, "activations": "fp32", "gradients": "fp32"} | topology,
        }
    )


def batches(spec, seed=5):
    """Endless microbatches, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shape = (spec.inner.batch_size, spec.data.seq_len + 1)
        yield torch.randint(VOCAB, shape, generator=generator)
