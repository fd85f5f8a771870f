"""The one dispatcher: how to compute what the function, the layer or a retrofitted layer asks for.

A `Request` says what is wanted; `attend` alone decides whether all logits are computed, by the
definition in `dense`, or tiles of them, and by which implementation.
"""

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask.attention import dense, parts, tiles_python
from keras_headmask.attention.finite import in_xla
from keras_headmask.attention.parts import Part
from keras_headmask.attention.tuning import Tuning, current_tuning
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import Bound
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.inputs import KeyFlag, MaskInput, QueryFlag


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One call of attention, whoever makes it.

    Args:
        query, key, value: `(B, T, H, D)`, `(B, S, H, D)`, `(B, S, H, Dv)`.
        rule: Everything that restricts, as one spec; `None` if nothing does.
        bound: The mask inputs of `rule`, prepared.
        scale: Factor of the logits.
        query_offset: Query i stands at position i + `query_offset`; `bound` has these positions.
        dropout: Share of the probabilities set to 0; 0 at inference.
        seed: For `dropout`: an int or a `keras.random.SeedGenerator`.
        bias: Added to the logits, broadcastable to `(B, H, T, S)`.
        wants_probabilities: Whether the caller reads them.
        tiled: `True` and `False` choose; `None` leaves it to size and rule.
        make_mask: Makes the whole mask, boolean of rank 4, for a caller that has it, or shares it
            with other layers; by default `rule` is evaluated. Without `rule`, all that restricts.
    """

    query: Any
    key: Any
    value: Any
    rule: MaskSpec | None = None
    bound: Bound | None = None
    _: dataclasses.KW_ONLY
    scale: float
    query_offset: Any = 0
    dropout: float = 0.0
    seed: Any = None
    bias: Any = None
    wants_probabilities: bool = False
    tiled: bool | None = None
    make_mask: Callable[[], Any] | None = None


def attend(request: Request) -> tuple[Any, Any]:
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
    return dense.attend(
        request.query,
        request.key,
        request.value,
        mask,
        request.scale,
        request.bias,
        drop,
        may_branch=not _in_dense_scope.get(),
    )


def all_that_restricts(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None = None,
    attention_mask: Any = None,
    query_mask: Any = None,
    value_mask: Any = None,
    key_mask: Any = None,
    window: MaskSpec | None = None,
) -> tuple[MaskSpec | None, dict[str, Any]]:
    """One spec for everything that restricts, and its mask inputs; `None` where nothing does.

    The names of what comes from outside the rule are in brackets, as no rule of JSON would have.
    What comes from outside is ANDed after the rule, so that no `~` or `|` inside reopens it.
    """
    specs = [] if spec is None else [spec]
    inputs = dict(mask_inputs or {})
    if attention_mask is not None:
        specs.append(MaskInput("(attention_mask)"))
        inputs["(attention_mask)"] = attention_mask
    if query_mask is not None:
        specs.append(QueryFlag("(query_mask)"))
        inputs["(query_mask)"] = (query_mask, None)
    for name, mask in (("(value_mask)", value_mask), ("(key_mask)", key_mask)):
        if mask is not None:
            specs.append(KeyFlag(name))
            inputs[name] = (None, mask)
    if window is not None:
        specs.append(window)
    return (functools.reduce(operator.and_, specs) if specs else None), inputs


_in_dense_scope: contextvars.ContextVar[bool] = contextvars.ContextVar("dense", default=False)


@contextlib.contextmanager
def dense_scope() -> Iterator[None]:
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
    token = _in_dense_scope.set(True)
    try:
        yield
    finally:
        _in_dense_scope.reset(token)


# --- Dense or tiled ------------------------------------------------------------------------------


def _is_tiled(request: Request) -> bool:
    if request.rule is None:  # there is nothing to skip
        return False
    sizes = queries, keys = request.query.shape[1], request.key.shape[1]
    if 0 in sizes or _in_dense_scope.get():
        return False
    # A symbolic Keras tensor cannot enter a loop of the backend's.
    symbolic = keras.backend.is_keras_tensor(request.query)
    needs_all = request.wants_probabilities or request.bias is not None or symbolic
    possible = not needs_all and _can_tile(*sizes, request.query_offset)
    if request.tiled and not possible:
        raise ValueError(
            "`tiled=True` is not possible here: "
            + (
                "returned probabilities, a bias and symbolic Keras tensors need all logits."
                if needs_all
                else "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
                f"`query_offset`. Received: queries={queries}, keys={keys}, "
                f"query_offset={request.query_offset!r}."
            )
        )
    if request.tiled is not None:
        return request.tiled
    return possible and _is_worth_it(request, current_tuning())


def _has_loops() -> bool:
    """Whether loops of TensorFlow's serve here, of sizes that the run decides."""
    return keras.backend.backend() == "tensorflow" and not in_xla()


def _can_tile(queries: int | None, keys: int | None, query_offset: Any) -> bool:
    # (JAX' unknown sizes are no `None`, and cannot be compared.)
    return _has_loops() or all(isinstance(x, int) for x in (queries, keys, query_offset))


def _is_worth_it(request: Request, tuning: Tuning) -> bool:
    """Whether tiles are likely faster, by what was measured on a CPU."""
    queries, keys = request.query.shape[1], request.key.shape[1]
    if None in (queries, keys):
        return True
    if queries * keys < tuning.fewest_pairs:
        return False
    if _has_loops():
        return True
    # Elsewhere a tile costs more to start, and only what positions tell is skipped.
    shares = []
    for part in _parts(_of_all(request, tuning)):
        plan = tiles_python.plan_of(part, queries, keys, request.query_offset)
        shares.extend([plan.share(keys)] * len(part.heads))
    return sum(shares) / len(shares) <= tuning.most_computed


# --- Which tiles ---------------------------------------------------------------------------------


def _tiled(request: Request) -> Any:
    """The context, in the dtype of the value."""
    given = request.query, request.key, request.value
    is_double = keras.backend.standardize_dtype(request.query.dtype) == "float64"
    operands = [ops.cast(x, "float64" if is_double else "float32") for x in given]
    of_all = _of_all(request, current_tuning())
    if request.dropout:
        batch = ops.shape(request.query)[0]
        drop = parts.dropout(request.dropout, request.seed, batch, len(of_all.heads), request.bound)
        of_all = of_all._replace(dropout=drop)
    return ops.cast(_by_length(of_all, operands, request.query_offset), request.value.dtype)


def _of_all(request: Request, tuning: Tuning) -> Part:
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


def _by_length(of_all: Part, operands: list[Any], query_offset: Any) -> Any:
    """On TensorFlow, short sequences go head by head, longer ones by tiles."""

    def tiles() -> Any:
        return _by_tiles(of_all, operands, query_offset)

    if not _has_loops() or of_all.dropout is not None:
        return tiles()
    from keras_headmask.attention import head_by_head

    queries, keys = operands[0].shape[1], operands[1].shape[1]
    most = of_all.tuning.most_pairs_by_head
    if None not in (queries, keys):
        is_short = queries * keys <= most
        return head_by_head.attend(of_all, *operands) if is_short else tiles()
    is_short = ops.shape(operands[0])[1] * ops.shape(operands[1])[1] <= most
    return ops.cond(is_short, lambda: head_by_head.attend(of_all, *operands), tiles)


def _by_tiles(of_all: Part, operands: list[Any], query_offset: Any) -> Any:
    contexts, order = [], []
    for part in _parts(of_all):
        of_part = [parts.of_heads(x, part.heads, axis=2) for x in operands]
        contexts.append(_tiles_of(part, *of_part, query_offset))
        order.extend(part.heads)
    context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=2)
    return parts.in_order(context, order, axis=2)


def _tiles_of(part: Part, query: Any, key: Any, value: Any, offset: Any) -> Any:
    queries, keys = query.shape[1], key.shape[1]
    known = None not in (queries, keys) and isinstance(offset, int)
    # TensorFlow's own loop can do what depends on data and on lengths not known yet, in a graph of
    # one size. Unrolled in Python, the same tiles train in less time if they are few.
    is_few = known and queries <= part.tuning.most_unrolled * part.tile
    if _has_loops() and (part.rule.inputs or not is_few):
        from keras_headmask.attention import tiles_tensorflow

        return tiles_tensorflow.attend(part, query, key, value)
    plan = tiles_python.plan_of(part, queries, keys, offset)
    return tiles_python.attend(part, plan, query, key, value)
