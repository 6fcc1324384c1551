"""A device that does not exist: tensors that live apart from the host's, for tests on a CPU.

Within `Accelerator`, `torch.device("meta")` stands for a GPU. Its tensors hold ordinary ones, on
which every operation runs, and what a real device lacks or pays for is refused:

    Refused (RuntimeError)   float64; an implicit copy to the host, as by `.item()` or `float()`, or
                             of a size that depends on values, as by a mask as an index; an
                             operation on tensors of both sides, whose values would be copied over

A tensor moves between the sides by `.to(...)`, `.cpu()` and `.copy_()`, and `torch.tensor` makes
one on the device. `copies` counts those to the host, in values.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from atoll.peer.training.devices import Device

DEVICE = torch.device("meta")
COPY = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
READ = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class Refused(RuntimeError):
    """A real accelerator would fail here, or wait."""


class OnDevice(torch.Tensor):
    """A tensor of the device; `inside` has its values."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.inside = inside
        return made

    def __tensor_flatten__(self):
        """Let `Module.to` keep tied parameters tied, as on a real device."""
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return OnDevice(inner["inside"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise Refused(f"{function} outside of the accelerator's mode")


class _Making(TorchFunctionMode):
    """Makes tensors on the host and moves them: on `meta`, torch would drop their values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not torch.tensor or torch.device(kwargs.get("device") or "cpu") != DEVICE:
            return function(*args, **kwargs)
        del kwargs["device"]
        return function(*args, **kwargs).to(DEVICE)


class Accelerator(TorchDispatchMode):
    """Runs the device's operations while it is entered, in one thread."""

    def __init__(self):
        super().__init__()
        self.copies = []
        """sizes of the copies to the host"""
        self._making = _Making()

    def __enter__(self):
        self._making.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._making.__exit__(*exc)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inside = any(isinstance(tensor, OnDevice) for tensor in tensors)
        target = kwargs.get("device")
        lands = torch.device(target) == DEVICE if target is not None else inside
        if not inside and not lands:
            return function(*args, **kwargs)
        if function in COPY:
            destination = args[0] if function is torch.ops.aten.copy_.default else None
            lands = isinstance(destination, OnDevice) if destination is not None else lands
            if inside and not lands:
                self.copies.append(args[-1].numel() if destination is not None else args[0].numel())
        else:
            self._expect_one_side(function, tensors)
        before = kwargs
        if target is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        made = function(*tree_map(_opened, args), **tree_map(_opened, kwargs))
        if not lands:
            return _given_back(function, args, before, made)
        _expect_no_float64(function, made)
        return _given_back(function, args, before, tree_map(_wrapped, made))

    def _expect_one_side(self, function, tensors):
        if function in READ:
            raise Refused(f"{function} waits for the device and copies to the host")
        if torch.Tag.dynamic_output_shape in function.tags and _is_sized_by_values(
            function, tensors
        ):
            raise Refused(f"{function} waits for the device to learn a size")
        apart = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
        if apart and len(apart) < len(tensors):
            raise Refused(f"{function} on tensors of the device and of the host")


def _is_sized_by_values(function, tensors):
    """Return whether the size of the result is not that of the arguments; a mask's index is not."""
    if function is not torch.ops.aten.index.Tensor:
        return True
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])


def _opened(leaf):
    return leaf.inside if isinstance(leaf, OnDevice) else leaf


def _wrapped(leaf):
    return OnDevice(leaf) if isinstance(leaf, Tensor) else leaf


def _expect_no_float64(function, made):
    for leaf in tree_leaves(made):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
            raise Refused(f"{function} gives float64, which MPS lacks")


def _given_back(function, args, kwargs, made):
    """Return the very tensor that an operation changed in place."""
    returns = function._schema.returns
    in_place = len(returns) == 1 and returns[0].alias_info and returns[0].alias_info.is_write
    return kwargs.get("out", args[0]) if in_place else made


@dataclass(frozen=True, kw_only=True)
class FakeDevice(Device):
    """The accelerator as a trainer's device; `meta` has no autocast of its own."""

    @property
    def label(self):
        return "fake"

    def autocast(self):
        return contextlib.nullcontext()


def fake_device():
    return FakeDevice(device=DEVICE, precision="float32")
