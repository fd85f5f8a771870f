"""Functions that PyTorch's compiler makes of the code of a kernel: one for each rule.

PyTorch compiles one code a few times, and then gives up. So each has code of its own, also for what
it is compiled for anew: sizes of 1, equal lengths, other dtypes, what has a gradient.
"""

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from keras_headmask.attention.head_groups import Part
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Bound, put_together, taken_apart

_OLDEST = (8, 0)  # of the capabilities of GPUs: Ampere
_MOST = 256  # functions that are kept; they hold no tensor


class NotCompiled(Exception):
    """PyTorch's compiler fails on a rule; its reason."""


_failed: dict[tuple, str] = {}  # what was tried in vain, by kernel and rule


def _about(tensor: Tensor) -> tuple:
    """The properties of an operand for which PyTorch compiles again."""
    ones = tuple(size == 1 for size in tensor.shape)
    return tensor.dtype, ones, tensor.is_contiguous(), tensor.requires_grad


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

    Raises:
        NotCompiled: for a rule that the compiler fails on.
    """

    @functools.wraps(compute)
    def call(part: Part, query_offset: int, *operands: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(part, query_offset, *operands)
        bound = part.bound or Bound(None, None, {})
        names, values = taken_apart(bound.leaf_inputs)
        nothing: Any = None
        about = query_offset in (0, 1), operands[0].shape[1] == operands[1].shape[1]
        of_operands = *about, *map(_about, operands), torch.is_grad_enabled()
        key = compute, part._replace(bound=nothing), names, of_operands
        if (reason := _failed.get(key[:3])) is not None:
            raise NotCompiled(reason)
        arguments = query_offset, tuple(bound[:2]), values, *operands
        try:
            return _function(*key)(*arguments)
        except FailOnRecompileLimitHit:
            _function.cache_clear()
            return _function(*key)(*arguments)
        except TorchDynamoException as error:
            if len(_failed) == _MOST:
                _failed.clear()
            _failed[key[:3]] = str(error).partition("\n")[0]
            raise NotCompiled(_failed[key[:3]]) from error

    return call


@functools.lru_cache(_MOST)
def _function(compute: Callable, part: Part, names: tuple, of_operands: tuple) -> Callable:
    def function(query_offset: int, positions: tuple, values: list, *operands: Tensor) -> Tensor:
        bound = Bound(positions[0], positions[1], put_together(names, values))
        return compute(part._replace(bound=bound), query_offset, *operands)

    code = function.__code__.replace(co_name=f"attention_{id(function)}")
    copied = types.FunctionType(code, function.__globals__, closure=function.__closure__)
    return torch.compile(copied, fullgraph=True)
