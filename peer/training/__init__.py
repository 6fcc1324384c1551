"""Local training: model, data, device, saved state and the training loop.

`trainer.Trainer` is the entry point. This package imports nothing, so that a command can import
`atoll.peer.training.data` without waiting for torch.
"""
