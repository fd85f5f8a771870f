"""The kernels, and which computes a request: one chain of conditions; the numbers are `Tuning`'s.

A kernel is a function of a request and all its heads that gives the context and probabilities.
Probabilities are those of `dense` alone, else `None`.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask._keras import in_vectorized_map, in_xla
from keras_headmask.attention import dense as definition
from keras_headmask.attention import fused as backends
from keras_headmask.attention import gathered as tiles
from keras_headmask.attention import scopes
from keras_headmask.attention.request import (
    Part,
    Request,
    by_group,
    drawn_dropout,
    mean_over_heads,
    sharing_of,
)
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.leaves import Full

_FULL = Full()  # (Made once: `torch.compile` cannot read how a spec is made.)
_LOG = logging.getLogger("keras_headmask")

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

    context = by_group(of_group, part, *operands)
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
    dropout = drawn_dropout(request.dropout, request.seed)
    return part._replace(soft_cap=changes.soft_cap, dropout=dropout), operands


# --- Which of them --------------------------------------------------------------------------------

# Gets each request, and may return the context in place of a kernel.
_Watch = Callable[[Request, Part], Tensor | None]
_watch: scopes.Held[_Watch | None] = scopes.Held("watch", None)


def watched(watch: _Watch) -> AbstractContextManager[Any]:
    """Let `watch` see each request that is made inside."""
    return scopes.holding(_watch, watch)


def choose(request: Request, part: Part) -> Kernel:
    """The kernel that computes `request`, of which `part` are all heads.

    Raises:
        ValueError: for `tiled=True` where nothing can be skipped.
    """
    if scopes.is_dense_scope():
        return dense
    sizes = request.query.shape[1], request.key.shape[1], request.query_offset
    may_skip = not (request.rule is None or request.mask is not None or 0 in sizes[:2])
    is_tensorflow, needs_all = keras.backend.backend() == "tensorflow", ""
    # (A symbolic Keras tensor cannot enter code of the backend's.)
    is_symbolic = keras.backend.is_keras_tensor(request.query)
    if request.wants_probabilities or request.changes.bias is not None or is_symbolic:
        needs_all = "returned probabilities, a bias and symbolic Keras tensors need all logits"
    elif is_tensorflow and in_vectorized_map():
        needs_all = "`tf.vectorized_map` maps no loop over tiles. Leave `tiled` out"
    if needs_all:
        if request.tiled and may_skip:
            raise _impossible(needs_all)
        return dense
    if may_skip and request.tiled is not False:
        if is_tensorflow and not in_xla():
            return loop
        if all(map(_is_known, sizes)):
            if request.tiled or _is_worth_it(request, part, *sizes):
                return gathered
        elif request.tiled:
            raise _impossible(
                "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
                "`query_offset`. Received: queries={}, keys={}, query_offset={!r}".format(*sizes)
            )
    return fused if backends.takes(request) else dense


def _is_known(size: Any) -> bool:
    """Whether a size is known when code is traced."""
    if keras.backend.backend() == "torch" and scopes.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return has_static_value(size)
    return isinstance(size, int)


def _is_worth_it(request: Request, part: Part, queries: int, keys: int, offset: int) -> bool:
    """Whether a sequence is long, and positions hide enough of it, to gather its tiles."""
    # A PyTorch GPU waits for each operation to be launched.
    fewest = part.tuning.fewest_pairs * (16 if getattr(request.query, "is_cuda", False) else 1)
    if queries * keys < fewest:
        return False
    share = mean_over_heads(part, lambda x: tiles.plan_of(x, queries, keys, offset).share)
    return share <= part.tuning.most_computed


def _impossible(reason: str) -> ValueError:
    return ValueError(f"`tiled=True` is not possible here: {reason}.")


def attend(request: Request) -> Result:
    """The context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before dropout.

    Both have the dtype of the value. The probabilities are `None` where not all logits were
    computed.

    Raises:
        ValueError: for `tiled=True` where nothing can be skipped.
    """
    part, watch = part_of_all(request), _watch.get()
    context = None if watch is None else watch(request, part)
    if context is not None:
        return context, None
    kernel = choose(request, part)
    # (In PyTorch's compiler it would split the graph.)
    if not (keras.backend.backend() == "torch" and scopes.is_compiling()):
        shapes = tuple(request.query.shape), tuple(request.key.shape)
        _LOG.debug("Attention of queries %s and keys %s: %s", *shapes, kernel.__name__)
    return kernel(request, part)


def part_of_all(request: Request) -> Part:
    """All heads, and what is known of them before a tile is cut."""
    heads, numbers = tuple(range(request.query.shape[2])), scopes.current_tuning()
    if request.tiled:  # not by all logits where there is a choice
        numbers = dataclasses.replace(numbers, most_logits=0)
    rule = _FULL if request.rule is None else request.rule
    rest = request.bound, request.scale, numbers
    return Part(rule, heads, *rest, sharing=sharing_of(request.query, request.key))
