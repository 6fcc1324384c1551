"""The low-communication methods of the field, by name.

>>> method = parse("streaming(count=2, tau=5, codec=int4)")
>>> group = in_process(8, method)                                       # atoll.optim
>>> worker = method.worker(model, inner, group.member(0), inner_steps=30)
"""

from atoll.optim.methods.base import (
    Method,
    MethodError,
    StateFormat,
    defaults_for,
    given,
    has_option,
    names,
    parse,
    register,
)
from atoll.optim.methods.co2 import CO2Method
from atoll.optim.methods.ddp import DDPMethod
from atoll.optim.methods.demo import DeMoMethod
from atoll.optim.methods.diloco import DiLoCoMethod
from atoll.optim.methods.dlion import DLionMethod
from atoll.optim.methods.eager import EagerMethod
from atoll.optim.methods.muloco import MuLoCoMethod
from atoll.optim.methods.noloco import NoLoCoMethod
from atoll.optim.methods.sparseloco import SparseLoCoMethod
from atoll.optim.methods.streaming import StreamingMethod

__all__ = [
    "CO2Method",
    "DDPMethod",
    "DLionMethod",
    "DeMoMethod",
    "DiLoCoMethod",
    "EagerMethod",
    "Method",
    "MethodError",
    "MuLoCoMethod",
    "NoLoCoMethod",
    "SparseLoCoMethod",
    "StateFormat",
    "StreamingMethod",
    "defaults_for",
    "given",
    "has_option",
    "names",
    "parse",
    "register",
]
