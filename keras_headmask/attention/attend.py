"""The one dispatcher: how to compute what the function, the layer or a retrofitted layer asks for.

A `Request` says what is wanted; `attend` alone decides whether all logits are computed, by the
definition in `dense`, or tiles of them, and by which implementation.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops

from keras_headmask.attention import dense, parts, tiles_python
from keras_headmask.attention.finite import in_xla
from keras_headmask.attention.parts import Part
from keras_headmask.attention.tuning import Tuning, current_tuning, holding
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.inputs import KeyFlag, MaskInput, QueryFlag


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One call of attention, whoever makes it."""

    query: Tensor  # (B, T, H, D)
    key: Tensor  # (B, S, H, D)
    value: Tensor  # (B, S, H, Dv)
    rule: MaskSpec | None = None  # everything that restricts, as one spec
    bound: Any = None  # the prepared mask inputs of `rule`: a `Bound`
    _: dataclasses.KW_ONLY
    scale: float  # factor of the logits
    query_offset: Length = 0  # query i stands at position i + `query_offset`, as in `bound`
    dropout: float = 0.0  # share of the probabilities set to 0; 0 at inference
    seed: Any = None  # for `dropout`: an int or a `keras.random.SeedGenerator`
    bias: Tensor | None = None  # added to the logits, broadcastable to (B, H, T, S)
    wants_probabilities: bool = False  # whether the caller reads them
    tiled: bool | None = None  # `None` leaves it to size and rule
    # Makes the whole mask, boolean of rank 4, for a caller that has it, or shares it with other
    # layers; by default `rule` is evaluated. Without `rule`, all that restricts.
    make_mask: Callable[[], Mask | None] | None = None


def attend(request: Request) -> tuple[Tensor, Tensor | None]:
    """The context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before dropout.

    Both have the dtype of the value. The probabilities are `None` where tiles were computed.

    Raises:
        ValueError: for `tiled=True` where tiling is not possible.
    """
    if _is_tiled(request):
        return _tiled(request), None
    mask = None
    if request.make_mask is not None:
        mask = request.make_mask()
    elif request.rule is not None:
        heads = request.query.shape[2]
        mask = evaluation.mask_of_all_heads(request.rule, request.bound, heads)
    drop = None
    if request.dropout:
        drop = functools.partial(keras.random.dropout, rate=request.dropout, seed=request.seed)
    operands = request.query, request.key, request.value
    may_branch = not _in_dense_scope.get()
    return dense.attend(*operands, mask, request.scale, request.bias, drop, may_branch)


def all_that_restricts(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    value_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: MaskSpec | None = None,
) -> tuple[MaskSpec | None, dict[str, Any]]:
    """One spec for everything that restricts, and its mask inputs; `None` where nothing does.

    The names of what comes from outside the rule are in brackets, as no rule of JSON would have.
    What comes from outside is ANDed after the rule, so that no `~` or `|` inside reopens it.
    """
    specs, inputs = [spec], dict(mask_inputs or {})
    for leaf, mask, given in (
        (MaskInput("(attention_mask)"), attention_mask, attention_mask),
        (QueryFlag("(query_mask)"), query_mask, (query_mask, None)),
        (KeyFlag("(value_mask)"), value_mask, (None, value_mask)),
        (KeyFlag("(key_mask)"), key_mask, (None, key_mask)),
    ):
        if mask is not None:
            specs.append(leaf)
            inputs[leaf.input] = given
    joined = [x for x in (*specs, window) if x is not None]
    return (functools.reduce(operator.and_, joined) if joined else None), inputs


_in_dense_scope: ContextVar[bool] = ContextVar("dense", default=False)


def dense_scope() -> AbstractContextManager[bool]:
    """Attention that is run or traced inside computes all logits, whatever its `tiled` says.

    Tiles are a loop whose sizes the data decide, which ONNX Runtime, OpenVINO and LiteRT do not
    run: a model is exported for them in this scope, by `model.export("model.onnx",
    format="onnx")`. What was traced before stays as it is.

    >>> import numpy as np
    >>> from keras_headmask import Window, dot_product_attention
    >>> x = np.ones((1, 512, 2, 4), "float32")
    >>> with dense_scope():
    ...     context = dot_product_attention(x, x, x, mask_spec=Window(2, 2))
    >>> context.shape == (1, 512, 2, 4)
    True
    """
    return holding(_in_dense_scope, True)


# --- Dense or tiled ------------------------------------------------------------------------------


def _is_tiled(request: Request) -> bool:
    queries, keys = sizes = request.query.shape[1], request.key.shape[1]
    if request.rule is None or 0 in sizes or _in_dense_scope.get():
        return False
    # A symbolic Keras tensor cannot enter a loop of the backend's.
    symbolic = keras.backend.is_keras_tensor(request.query)
    offset, obstacle = request.query_offset, None
    if request.wants_probabilities or request.bias is not None or symbolic:
        obstacle = "returned probabilities, a bias and symbolic Keras tensors need all logits."
    # (Sizes unknown to JAX are not `None`, and comparing them raises.)
    elif not (_has_loops() or all(isinstance(x, int) for x in (queries, keys, offset))):
        obstacle = (
            "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
            f"`query_offset`. Received: queries={queries}, keys={keys}, query_offset={offset!r}."
        )
    if request.tiled and obstacle:
        raise ValueError(f"`tiled=True` is not possible here: {obstacle}")
    if request.tiled is not None:
        return request.tiled
    return obstacle is None and _is_worth_it(request, current_tuning())


def _has_loops() -> bool:
    """Whether TensorFlow's loops, of sizes that the run decides, are possible here."""
    return keras.backend.backend() == "tensorflow" and not in_xla()


def _is_worth_it(request: Request, tuning: Tuning) -> bool:
    """Whether tiles are likely faster, by what was measured on a CPU."""
    queries, keys = request.query.shape[1], request.key.shape[1]
    if None in (queries, keys):
        return True
    if queries * keys < tuning.fewest_pairs:
        return False
    if _has_loops():
        return True
    # Elsewhere a tile costs more to start, and only what positions show is skipped.
    shares = []
    for part in _parts(_of_all(request, tuning)):
        plan = tiles_python.plan_of(part, queries, keys, request.query_offset)
        shares.extend([plan.share(keys)] * len(part.heads))
    return sum(shares) / len(shares) <= tuning.most_computed


# --- Which tiles ---------------------------------------------------------------------------------


def _tiled(request: Request) -> Tensor:
    """The context, in the dtype of the value; on TensorFlow, short sequences go head by head."""
    given = request.query, request.key, request.value
    is_double = keras.backend.standardize_dtype(request.query.dtype) == "float64"
    operands = [ops.cast(x, "float64" if is_double else "float32") for x in given]
    of_all = _of_all(request, current_tuning())
    if request.dropout:
        batch = ops.shape(request.query)[0]
        drop = parts.dropout(request.dropout, request.seed, batch, len(of_all.heads), of_all.bound)
        of_all = of_all._replace(dropout=drop)
    tiles = functools.partial(_by_tiles, of_all, operands, request.query_offset)
    if not _has_loops() or request.dropout:
        return ops.cast(tiles(), request.value.dtype)
    from keras_headmask.attention import head_by_head

    by_head = functools.partial(head_by_head.attend, of_all, *operands)
    queries, keys = (x.shape[1] for x in operands[:2])
    if None in (queries, keys):
        pairs = ops.shape(operands[0])[1] * ops.shape(operands[1])[1]
        context = ops.cond(pairs <= of_all.tuning.most_pairs_by_head, by_head, tiles)
    else:
        context = by_head() if queries * keys <= of_all.tuning.most_pairs_by_head else tiles()
    return ops.cast(context, request.value.dtype)


def _of_all(request: Request, tuning: Tuning) -> Part:
    assert request.rule is not None
    heads = tuple(range(request.query.shape[2]))
    return Part(request.rule, heads, request.bound, request.scale, tuning)


def _parts(of_all: Part) -> list[Part]:
    """Heads with equal rules together."""
    return [
        of_all._replace(
            rule=rule,
            heads=heads,
            is_local=rule.is_local,
            dropout=of_all.dropout and of_all.dropout.for_heads(heads),
        )
        for rule, heads in head_groups(of_all.rule, len(of_all.heads))
    ]


def _by_tiles(of_all: Part, operands: list[Tensor], query_offset: Length) -> Tensor:
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    known = None not in (queries, keys) and isinstance(query_offset, int)
    contexts: list[Tensor] = []
    order: list[int] = []
    for part in _parts(of_all):
        of_part = [parts.of_heads(x, part.heads, axis=2) for x in operands]
        # TensorFlow's own loop can do what depends on data and on lengths not known yet, in a graph
        # of one size. Unrolled in Python, the same tiles train in less time if they are few.
        is_few = known and queries <= part.tuning.most_unrolled * part.tile
        if _has_loops() and (part.rule.inputs or not is_few):
            from keras_headmask.attention import tiles_tensorflow

            contexts.append(tiles_tensorflow.attend(part, *of_part))
        else:
            plan = tiles_python.plan_of(part, queries, keys, query_offset)
            contexts.append(tiles_python.attend(part, plan, *of_part))
        order.extend(part.heads)
    context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=2)
    return parts.in_order(context, order, axis=2)
