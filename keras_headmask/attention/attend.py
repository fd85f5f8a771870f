"""The one dispatcher, and `hm.dot_product_attention`: attention for a layer of one's own.

A `Request` says what the function, the layer or a retrofitted layer asks for; `attend` alone
decides whether all logits are computed, by the definition in `dense`, or tiles of them, and by
which implementation.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask._keras import in_xla
from keras_headmask.attention import cpu, dense, looking, on_jax, on_torch, parts, precision
from keras_headmask.attention.changes import NONE, Changes, Positions, for_tiles, given_changes
from keras_headmask.attention.checking import check_operands, checked_tiled
from keras_headmask.attention.parts import Part
from keras_headmask.attention.tuning import current_tuning, is_dense_scope
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import evaluation, offsets
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.inputs import KeyFlag, MaskInput, QueryFlag
from keras_headmask.rules.positions import Full, Window

_CALLED = "hm.dot_product_attention(query, key, value, ...)"
# (Made once: `torch.compile` cannot read how a spec is made.)
_FROM_OUTSIDE: tuple[Any, ...] = (
    MaskInput("(attention_mask)"),
    QueryFlag("(query_mask)"),
    KeyFlag("(value_mask)"),
    KeyFlag("(key_mask)"),
)


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    mask_spec: MaskSpec | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    scale: float | None = None,
    query_offset: Length | None = None,
    dropout: float = 0.0,
    return_scores: bool = False,
    bias: Tensor | None = None,
    seed: Any = None,
    tiled: bool | None = None,
    position_bias: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """`softmax(query @ key^T * scale + bias)` over the allowed keys, times `value`.

    Args:
        query: `(B, T, H, D)`.
        key: `(B, S, Hk, D)`. Hk divides H: query head h reads key head h // (H / Hk). Tiles do not
            repeat the keys and values.
        value: `(B, S, Hk, Dv)`.
        mask: Boolean or integer, True = may attend: `(T, S)`, `(B, T, S)` or
            `(B or 1, H or 1, T, S)`.
        mask_spec: A `MaskSpec`; what it allows is ANDed with `mask`.
        mask_inputs: The tensors that `mask_spec` reads, by name.
        scale: Factor of the logits; `1 / sqrt(D)` by default.
        query_offset: Query i stands at position i + `query_offset` (for `mask_spec`). Left out it
            is 0, with a warning where a rule on positions meets fewer queries than keys: a step
            with a cache of keys needs it.
        dropout: Share of the probabilities set to 0, the rest scaled up; applied whenever it is
            above 0, so pass 0 at inference.
        return_scores: Whether to return the probabilities, before dropout, too.
        bias: Float tensor added to the logits, broadcastable to `(B, H, T, S)`. It grades the
            allowed keys; no bias can open a hidden one, and -inf hides as `mask` does.
        seed: For `dropout`: an int or a `keras.random.SeedGenerator`.
        tiled: Whether to skip masked-out work, tile by tile (`True`), or to compute all logits
            (`False`). By default the faster of the two, by size and rule. Returned probabilities
            need all logits, and so do symbolic Keras tensors; where nothing restricts there is
            nothing to skip. Dense and tiled attention draw different dropouts from one seed.
        position_bias: `hm.alibi(H)`, or for a learned one a pair of the value and its table:
            `(hm.relative_position_bias(H), table)`. Made by tile, at the positions of the rule.
        logits_soft_cap: Logits become `cap * tanh(logits / cap)`, before any bias.
        sinks: `(H,)`, a logit for each head that joins the softmax's sum and has no value, so that
            the probabilities of a row sum to less than 1.

    Returns:
        The context `(B, T, H, Dv)` in the dtype of `value`; with `return_scores`, a pair with the
        probabilities `(B, H, T, S)`.

    Raises:
        TypeError: for operands that are not floats, a float mask or mask input, or a `mask_spec`
            that is not a spec.
        ValueError: for shapes that do not fit, mask inputs that the spec does not read or lacks, a
            `dropout` outside [0, 1), a soft cap below the smallest normal float32 (1.18e-38), or
            `tiled=True` where tiling is not possible.

    >>> import numpy as np
    >>> from keras_headmask import Window
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> rule = Window(after=0)
    >>> _, probabilities = dot_product_attention(x, x, x, mask_spec=rule, return_scores=True)
    >>> print(ops.convert_to_numpy(probabilities[0, 0]).round(2))
    [[1.   0.   0.  ]
     [0.5  0.5  0.  ]
     [0.33 0.33 0.33]]
    """
    query, key, value = (masks.as_tensor(x) for x in (query, key, value))
    check_operands(query=query, key=key, value=value)
    batch, queries, heads, size = query.shape
    lengths = evaluation.Lengths(batch, heads, queries, key.shape[1])
    if mask is not None:
        masks.check_shape(masks.as_bool(mask), "mask", *lengths)
    if mask_spec is not None:
        check_spec(mask_spec, "mask_spec", _CALLED.replace("...", "mask_spec=SPEC"))
    changed = given_changes(lengths, bias, position_bias, logits_soft_cap, sinks)
    positional = mask_spec if changed.position_bias is None else Window(after=0)
    query_offset = offsets.given_offset(query_offset, positional, queries, lengths.keys)
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and below 1. Received: {dropout}.")
    tiled = checked_tiled(tiled)
    evaluation.check_inputs(mask_spec, mask_inputs, lengths, query_offset, _CALLED)
    looking.operation_runs()
    rule, inputs = all_that_restricts(mask_spec, mask_inputs, mask)
    bound = None
    if rule is not None:
        (examples, length_q), length_k = ops.shape(query)[:2], ops.shape(key)[1]
        bound = evaluation.bind(rule, inputs, length_q, length_k, query_offset, batch=examples)
    request = Request(
        query,
        key,
        value,
        rule,
        bound,
        scale=1 / math.sqrt(size) if scale is None else scale,
        query_offset=query_offset,
        dropout=dropout,
        seed=seed,
        changes=changed,
        wants_probabilities=return_scores,
        tiled=tiled,
    )
    context, probabilities = attend(request)
    return (context, probabilities) if return_scores else context


# --- For whoever asks ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One call of attention, whoever makes it."""

    query: Tensor  # (B, T, H, D)
    key: Tensor  # (B, S, Hk, D); Hk divides H, and query head h reads key head h // (H / Hk)
    value: Tensor  # (B, S, Hk, Dv)
    rule: MaskSpec | None = None  # everything that restricts, as one spec
    bound: Any = None  # the prepared mask inputs of `rule`: a `Bound`
    _: dataclasses.KW_ONLY
    scale: float  # factor of the logits
    query_offset: Length = 0  # query i stands at position i + `query_offset`, as in `bound`
    dropout: float = 0.0  # share of the probabilities set to 0; 0 at inference
    seed: Any = None  # for `dropout`: an int or a `keras.random.SeedGenerator`
    changes: Changes = NONE  # what changes logits beside the mask
    wants_probabilities: bool = False  # whether the caller reads them
    tiled: bool | None = None  # `None` leaves it to size and rule
    # Makes the whole mask, boolean of rank 4, for a caller that has it, or shares it with other
    # layers; by default `rule` is evaluated. Without `rule`, all that restricts.
    make_mask: Callable[[], Mask | None] | None = None

    @property
    def sharing(self) -> int:
        """How many query heads share a key head."""
        return parts.sharing_of(self.query, self.key)

    @property
    def positions(self) -> Positions:
        """Of the queries and of the keys."""
        bound = self.bound or evaluation.bind(Full(), None, *self.lengths, self.query_offset)
        return bound.query_positions, bound.key_positions

    @property
    def lengths(self) -> tuple[Length, Length]:
        """Of the queries and of the keys."""
        return ops.shape(self.query)[1], ops.shape(self.key)[1]


def attend(request: Request) -> tuple[Tensor, Tensor | None]:
    """The context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before dropout.

    Both have the dtype of the value. The probabilities are `None` where tiles were computed.

    Raises:
        ValueError: for `tiled=True` where tiling is not possible.
    """
    if request.rule is not None:
        cpu.hint()
    return (_tiled(request), None) if _is_tiled(request) else _dense(request)


def _dense(request: Request) -> tuple[Tensor, Tensor]:
    mask = None
    if request.make_mask is not None:
        mask = request.make_mask()
    elif request.rule is not None:
        heads = request.query.shape[2]
        mask = evaluation.mask_of_all_heads(request.rule, request.bound, heads)
    drop = None
    if request.dropout:
        drop = functools.partial(keras.random.dropout, rate=request.dropout, seed=request.seed)
    operands, changes = (request.query, request.key, request.value), request.changes
    positions = None if changes.position_bias is None else request.positions
    may_branch = not is_dense_scope()
    return dense.attend(*operands, mask, request.scale, changes, positions, drop, may_branch)


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
    given = attention_mask, query_mask, value_mask, key_mask
    as_inputs = attention_mask, (query_mask, None), (None, value_mask), (None, key_mask)
    for leaf, mask, as_input in zip(_FROM_OUTSIDE, given, as_inputs, strict=True):
        if mask is not None:
            specs.append(leaf)
            inputs[leaf.input] = as_input
    joined = [x for x in (*specs, window) if x is not None]
    return (functools.reduce(operator.and_, joined) if joined else None), inputs


# --- Dense or tiled ------------------------------------------------------------------------------


def _has_loops() -> bool:
    """Whether TensorFlow's loops, of sizes that the run decides, are possible here."""
    return keras.backend.backend() == "tensorflow" and not in_xla()


def _own_tiles(request: Request) -> Callable | None:
    """The tiles of PyTorch or JAX, of known lengths, that gain even where nothing is skipped.

    They know no dropout, PyTorch's not what changes logits either, and multiply float32: in half
    precision PyTorch's gradient rounds more than that of all logits at once.
    """
    operands = request.query, request.key, request.value
    is_torch = keras.backend.backend() == "torch"
    if request.dropout or (is_torch and request.changes.are_some):
        return None
    if precision.half_dtype(request.scale, *operands) is not None:
        return None
    if is_torch:
        return on_torch.tiles(request)
    if on_jax.has_loops(request.query.shape):
        from keras_headmask.attention import tiles_jax

        return tiles_jax.attend
    return None


def _is_tiled(request: Request) -> bool:
    queries, keys = sizes = request.query.shape[1], request.key.shape[1]
    if request.rule is None or 0 in sizes or is_dense_scope():
        return False
    # A symbolic Keras tensor cannot enter a loop of the backend's.
    symbolic = keras.backend.is_keras_tensor(request.query)
    offset, obstacle = request.query_offset, None
    if request.wants_probabilities or symbolic:
        obstacle = "returned probabilities and symbolic Keras tensors need all logits."
    # (Sizes unknown to JAX are not `None`, and comparing them raises.)
    elif not (_has_loops() or all(isinstance(x, int) for x in (queries, keys, offset))):
        obstacle = (
            "outside TensorFlow graphs, and in XLA, tiling needs known lengths and an int "
            f"`query_offset`. Received: queries={queries}, keys={keys}, query_offset={offset!r}."
        )
    if request.tiled and obstacle:
        raise ValueError(f"`tiled=True` is not possible here: {obstacle}")
    if request.tiled is not None or obstacle:
        return bool(request.tiled)
    # Whether tiles are likely faster, by what was measured on a CPU.
    if None in sizes:
        return True
    tuning = current_tuning()
    if queries * keys < tuning.fewest_pairs:
        return False
    if _has_loops() or _own_tiles(request) is not None:
        return True
    # Elsewhere a tile costs more to start, and only what positions show is skipped.
    from keras_headmask.attention import tiles_python

    shares = []
    for part in parts.by_rule(_part_of_all(request)):
        plan = tiles_python.plan_of(part, queries, keys, offset)
        shares.extend([plan.share(keys)] * len(part.heads))
    return sum(shares) / len(shares) <= tuning.most_computed


# --- Which tiles ---------------------------------------------------------------------------------


def _tiled(request: Request) -> Tensor:
    """The context, in the dtype of the value."""
    given = request.query, request.key, request.value
    is_double = keras.backend.standardize_dtype(request.query.dtype) == "float64"
    operands = [ops.cast(x, "float64" if is_double else "float32") for x in given]
    sizes = ops.shape(request.query)[0], request.query.shape[2], *request.lengths
    changes = for_tiles(request.changes, operands[0].dtype, *sizes)
    operands += changes.tensors
    part = _part_of_all(request)._replace(changes=changes.without_tensors())
    if request.dropout:
        drawn = parts.dropout(request.dropout, request.seed, *sizes[:2], request.bound)
        part = part._replace(dropout=drawn)
    tiles = functools.partial(_by_tiles, request, part, operands)
    if _has_loops():
        from keras_headmask.attention import on_tensorflow

        context = on_tensorflow.attend(part, tiles, *operands)
    else:
        context = tiles()
    return ops.cast(context, request.value.dtype)


def _part_of_all(request: Request) -> Part:
    """All heads, and what is known of them before a tile is cut."""
    assert request.rule is not None
    heads, tuning = tuple(range(request.query.shape[2])), current_tuning()
    if request.tiled:  # not by all logits where there is a choice
        tuning = dataclasses.replace(tuning, most_logits_at_once=0)
    half = precision.half_dtype(request.scale, request.query, request.key, request.value)
    rest = request.bound, request.scale, tuning
    return Part(request.rule, heads, *rest, sharing=request.sharing, half=half)


def _by_tiles(request: Request, of_all: Part, operands: list[Tensor]) -> Tensor:
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    own_tiles = _own_tiles(request)
    changes = of_all.changes.with_tensors(operands[3:])
    contexts: list[Tensor] = []
    made = parts.by_rule(of_all)
    sets = [part.heads for part in made]
    of_keys = [parts.key_heads(heads, request.sharing) for heads in sets]
    cuts = [
        parts.cut_into(x, own, 2)
        for x, own in zip(operands[:3], (sets, *[of_keys] * 2), strict=True)
    ]
    for part, *of_part in zip(made, *cuts, strict=True):
        of_part += parts.changes_of_heads(changes, part.heads).tensors
        # TensorFlow's own loop can do what depends on data, in a graph of one size. Unrolled in
        # Python, the same tiles train in less time if they are few.
        are_few = queries <= part.tuning.most_unrolled * part.tile
        may_unroll = are_few and isinstance(request.query_offset, int)
        if _has_loops() and (part.rule.inputs or not may_unroll):
            from keras_headmask.attention import tiles_tensorflow

            contexts.append(tiles_tensorflow.attend(part, *of_part))
        elif own_tiles is not None:
            contexts.append(own_tiles(part, request.query_offset, *of_part))
        else:
            from keras_headmask.attention import tiles_python

            plan = tiles_python.plan_of(part, queries, keys, request.query_offset)
            contexts.append(tiles_python.attend(part, plan, *of_part))
    return parts.joined(contexts, sets, 2)
