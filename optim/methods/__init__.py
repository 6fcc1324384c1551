"""The low-communication methods of the field, by name.

>>> method = parse("diloco(lr=0.8, momentum=0.5)")
>>> group = in_process(8, method)                                       # atoll.optim
>>> worker = method.worker(model, inner, group.member(0), inner_steps=30)
"""

from atoll.optim.methods.base import Method, MethodError
from atoll.optim.methods.ddp import DDP, DDPMethod
from atoll.optim.methods.diloco import DiLoCoMethod
from atoll.optim.methods.registry import names, parse, register

__all__ = [
    "DDP",
    "DDPMethod",
    "DiLoCoMethod",
    "Method",
    "MethodError",
    "names",
    "parse",
    "register",
]
