"""Functions that PyTorch's compiler makes of the code of a kernel: one for each rule."""

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

from keras_headmask.attention.head_groups import Part
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Bound

_OLDEST = (8, 0)  # of the capabilities of GPUs: Ampere
_MOST = 256  # functions that are kept; they hold no tensor


def is_trained(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def can_compile(where: torch.device) -> bool:
    """Whether PyTorch's compiler writes kernels for a GPU, as it does already where it compiles."""
    if torch.compiler.is_compiling():
        return True
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(where) >= _OLDEST


def one_compiled(compute: Callable) -> Callable:
    """Let `compute(part, query_offset, *operands)` be compiled, once for all equal `Part`s.

    In code that is compiled already it is a part of that.
    """

    @functools.wraps(compute)
    def call(part: Part, query_offset: int, *operands: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(part, query_offset, *operands)
        bound = part.bound or Bound(None, None, {})
        names = tuple((leaf, tuple(values)) for leaf, values in bound.leaf_inputs.items())
        values = [list(values.values()) for values in bound.leaf_inputs.values()]
        nothing: Any = None
        of_operands = tuple(x.dtype for x in operands), is_trained(*operands)
        function = _function(compute, part._replace(bound=nothing), names, of_operands)
        return function(query_offset, tuple(bound[:2]), values, *operands)

    return call


@functools.lru_cache(_MOST)
def _function(compute: Callable, part: Part, names: tuple, of_operands: tuple) -> Callable:
    def function(query_offset: int, positions: tuple, values: list, *operands: Tensor) -> Tensor:
        inputs = {
            leaf: dict(zip(of_leaf, given, strict=True))
            for (leaf, of_leaf), given in zip(names, values, strict=True)
        }
        bound = Bound(positions[0], positions[1], inputs)
        return compute(part._replace(bound=bound), query_offset, *operands)

    # With code of its own: PyTorch compiles one code a few times, and no more.
    code = function.__code__.replace(co_name=f"attention_{id(function)}")
    own = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(own, fullgraph=True)
