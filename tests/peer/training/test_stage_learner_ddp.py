"""Several peers a stage with `ddp`, against the model in one piece with as many times the batch."""

import pytest
import torch

from atoll.optim.inner import build
from atoll.optim.inprocess.rounds import in_process
from atoll.optim.methods import parse
from atoll.peer.training import models
from atoll.peer.training.opening import slices_of
from atoll.peer.training.permission import Allowed
from support.small_stages import VOCAB, batches, spec_of
from support.staged_peers import trained

STEPS, ACCUMULATION = 6, 2
DDP = parse("ddp(codec=fp32, clip_at=0)")
INCARNATION = "1" * 32


def in_one_piece(spec, peers):
    """The gradients of each step by parameter, and the parameters at the end."""
    known = slices_of(spec, VOCAB, Allowed())
    model = known.build(range(len(known)), seed=spec.run.seed)
    optimizer = build("adamw", model, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    group = in_process(1, DDP, inner_steps=1)
    worker = DDP.worker(model, optimizer, group.member(0), inner_steps=1)
    drawn, gradients = [batches(spec, seed) for seed in range(peers)], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = spec.inner.rate.at(step, 0)
        optimizer.zero_grad()
        texts = [next(each) for each in drawn for _ in range(ACCUMULATION)]
        batch = torch.cat(texts)
        models.loss_of(model, batch[:, :-1], batch[:, 1:]).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        worker.step(tokens=batch[:, 1:].numel())
    return gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("stages", "peers"), [(2, 2), pytest.param(3, 3, marks=pytest.mark.exhaustive)]
)
def test_peers_of_a_stage_train_as_one_with_as_many_times_the_batch(stages, peers):
    spec = spec_of(stages, accumulation=ACCUMULATION, deadline_s=50.0)
    expected, whole = in_one_piece(spec, peers)
    found, hops = trained(spec, peers, DDP, STEPS)
    for stage in found:
        for step in range(STEPS):
            for name in stage[0].gradients[step]:
                mean = sum(peer.gradients[step][name] for peer in stage) / peers
                most = float(expected[step][name].abs().max())
                assert torch.allclose(mean, expected[step][name], rtol=1e-4, atol=1e-5 * most), (
                    step,
                    name,
                )
        for peer in stage:
            for name, param in peer.learner.model.named_parameters():
                assert torch.allclose(param, whole[name], rtol=1e-3, atol=1e-4), name
    assert [hop.statistics().omitted for hop in hops] == [{}] * len(hops)
