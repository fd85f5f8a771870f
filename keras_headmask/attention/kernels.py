"""The kernels: functions of a request and all its heads that give the context and probabilities.

Probabilities are those of `dense` alone, else `None`. `choose` says which computes a request.
"""

import functools
from collections.abc import Callable

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import dense as definition
from keras_headmask.attention import fused as backends
from keras_headmask.attention import gathered as tiles
from keras_headmask.attention import head_groups
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.request import Request
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules import evaluation

Result = tuple[Tensor, Tensor | None]
Kernel = Callable[[Request, Part], Result]


def loop(request: Request, part: Part) -> Result:
    """TensorFlow's loop over tiles, at any lengths; all logits where they are few."""
    from keras_headmask.attention.tensorflow import by_size

    part, operands = _for_tiles(request, part)
    return ops.cast(by_size.compute(part, *operands), request.value.dtype), None


def gathered(request: Request, part: Part) -> Result:
    """Each tile and the keys that positions let it see, at known lengths."""
    part, operands = _for_tiles(request, part)
    sizes = request.query.shape[1], request.key.shape[1], request.query_offset

    def of_group(group: Part, *operands: Tensor) -> Tensor:
        return tiles.compute(group, tiles.plan_of(group, *sizes), *operands)

    context = head_groups.by_group(of_group, part, *operands)
    return ops.cast(context, request.value.dtype), None


def fused(request: Request, part: Part) -> Result:
    """The attention of PyTorch or JAX, given the whole mask."""
    operands = request.query, request.key, request.value
    return backends.attention(*operands, _whole_mask(request), request.scale), None


def dense(request: Request, part: Part) -> Result:
    """All logits, by the definition."""
    drop = None
    if request.dropout:
        drop = functools.partial(keras.random.dropout, rate=request.dropout, seed=request.seed)
    operands = request.query, request.key, request.value
    mask = _whole_mask(request)
    return definition.attention(*operands, mask, request.scale, request.changes, drop)


# Where the code of each is.
FILES: dict[Kernel, str] = {
    loop: "attention/tensorflow/by_size.py",
    gathered: "attention/gathered.py",
    fused: "attention/fused.py",
    dense: "attention/dense.py",
}


def _whole_mask(request: Request) -> Mask | None:
    """All that restricts, of rank 4; `None` where nothing does."""
    if request.rule is None:
        return None if request.mask is None else masks.lift(request.mask)
    return evaluation.mask_of_all_heads(request.rule, request.bound, request.query.shape[2])


def _for_tiles(request: Request, part: Part) -> tuple[Part, list[Tensor]]:
    """The operands in at least float32: query, key, value, and sinks if there are some."""
    changes, tensors = request.changes, [request.query, request.key, request.value]
    is_double = keras.backend.standardize_dtype(request.query.dtype) == "float64"
    tensors += [] if changes.sinks is None else [changes.sinks]
    operands = [ops.cast(x, "float64" if is_double else "float32") for x in tensors]
    dropout = head_groups.dropout(request.dropout, request.seed)
    return part._replace(soft_cap=changes.soft_cap, dropout=dropout), operands
