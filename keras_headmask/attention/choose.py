"""Which kernel computes a request: one chain of conditions; the numbers are `Tuning`'s."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_headmask._keras.tensorflow import in_vectorized_map, in_xla
from keras_headmask.attention import fused, gathered, head_groups, kernels, scopes
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.request import Request
from keras_headmask.masks import Tensor
from keras_headmask.rules.positions import Full

_FULL = Full()  # (Made once: `torch.compile` cannot read how a spec is made.)
_LOG = logging.getLogger("keras_headmask")

# Gets each request, and may return the context in place of a kernel.
_Watch = Callable[[Request, Part], Tensor | None]
_watch: scopes.Held[_Watch | None] = scopes.Held("watch", None)


def watched(watch: _Watch) -> AbstractContextManager[Any]:
    """Let `watch` see each request that is made inside."""
    return scopes.holding(_watch, watch)


def choose(request: Request, part: Part) -> kernels.Kernel:
    """The kernel that computes `request`, of which `part` are all heads.

    Raises:
        ValueError: for `tiled=True` where nothing can be skipped.
    """
    if scopes.is_dense_scope():
        return kernels.dense
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
        return kernels.dense
    if may_skip and request.tiled is not False:
        if is_tensorflow and not in_xla():
            return kernels.loop
        if all(map(_is_known, sizes)):
            if request.tiled or _is_worth_it(request, part, *sizes):
                return kernels.gathered
        elif request.tiled:
            raise _impossible(
                "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
                "`query_offset`. Received: queries={}, keys={}, query_offset={!r}".format(*sizes)
            )
    return kernels.fused if fused.takes(request) else kernels.dense


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
    share = head_groups.mean(part, lambda x: gathered.plan_of(x, queries, keys, offset).share)
    return share <= part.tuning.most_computed


def _impossible(reason: str) -> ValueError:
    return ValueError(f"`tiled=True` is not possible here: {reason}.")


def attend(request: Request) -> kernels.Result:
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
    return Part(rule, heads, *rest, sharing=request.sharing)
