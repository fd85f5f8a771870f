"""One call of attention, and all that restricts it."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import head_groups
from keras_headmask.attention.dense import NONE, Changes
from keras_headmask.attention.scopes import is_dense_scope
from keras_headmask.masks import Length, Mask, Tensor, sizes
from keras_headmask.rules import evaluation, graphs
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import Bound, as_pair, as_sides
from keras_headmask.rules.leaves import KeyFlag, MaskInput, QueryFlag
from keras_headmask.rules.protocol import Sizes

# (Made once: `torch.compile` cannot read how a spec is made.)
_FROM_OUTSIDE: tuple[Any, ...] = (
    MaskInput("(attention_mask)"),
    QueryFlag("(query_mask)"),
    KeyFlag("(value_mask)"),
    KeyFlag("(key_mask)"),
)
_FROM_OUTSIDE[1] & _FROM_OUTSIDE[2]  # (So that it has seen one made, and can join others.)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One call of attention, by the function, a layer or a retrofitted layer."""

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
    mask: Mask | None = None  # in place of `rule`: all that restricts, boolean, of rank 2 to 4

    @property
    def sharing(self) -> int:
        """How many query heads share a key head."""
        return head_groups.sharing_of(self.query, self.key)


def bound_to(
    rule: MaskSpec,
    inputs: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Length,
    **known: Any,
) -> tuple[Bound, Tensor]:
    """`evaluation.bind` for operands `(B, L, H, D)`, and the query, which a graph checks.

    What a TensorFlow graph does not know of their sizes is read off a mask input, if one says it:
    then all layers that read it share what is made of it.
    """
    check_operands(query, key, value)
    (batch, queries), keys = sizes(query)[:2], sizes(key)[1]
    known_sizes = Sizes(batch, queries, keys)
    if _is_graph(query):
        known["heads"], checks = query.shape[2], graphs.operand_checks(query, key, value)
        if any(not isinstance(size, int) for size in known_sizes):
            given = known_sizes, rule, inputs, query_offset, query, key
            known_sizes, query = _sizes_from_inputs(*given)
        query = graphs.after(checks, query)
    lengths = known_sizes.queries, known_sizes.keys, query_offset
    return evaluation.bind(rule, inputs, *lengths, batch=known_sizes.batch, **known), query


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise where known sizes of operands `(B, L, H, D)` do not fit; the key heads may be fewer."""
    # (Pair by pair: in a set, PyTorch's compiler would take each length for a constant.)
    pairs = (0, query, key), (0, key, value), (0, query, value), (1, key, value), (2, key, value)
    if not all(_agree(x.shape[axis], y.shape[axis]) for axis, x, y in (*pairs, (3, query, key))):
        operands = {"query": query, "key": key, "value": value}
        received = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
        raise ValueError(f"{graphs.OPERANDS} Received: {received}.")


def _agree(size: int | None, other: int | None) -> bool:
    return None in (size, other) or size == other


def _is_graph(query: Tensor) -> bool:
    """Whether a TensorFlow graph is traced that runs where `checks` are obeyed."""
    if keras.backend.backend() != "tensorflow" or keras.backend.is_keras_tensor(query):
        return False
    import tensorflow as tf

    return not (tf.executing_eagerly() or _keras.in_xla() or is_dense_scope())


def _sizes_from_inputs(
    sizes: Sizes,
    rule: MaskSpec,
    inputs: Mapping[str, Any],
    query_offset: Length,
    query: Tensor,
    key: Tensor,
) -> tuple[Sizes, Tensor]:
    """See `graphs.sizes_from_input`."""
    kinds = {
        name: kind
        for name, kind in rule.inputs.items()
        if kind.rank is not None and not graphs.is_outside(name)
    }
    if not kinds:
        return sizes, query
    name = max(kinds, key=lambda name: len(kinds[name].sides))  # the first that says both lengths
    has_offset = not (isinstance(query_offset, int) and query_offset == 0)
    is_cut, mask_input = has_offset and as_pair(inputs[name]) is None, as_sides(inputs[name])
    is_self = _keras.are_as_long(query, key)
    return graphs.sizes_from_input(
        sizes, name, mask_input, kinds[name].sides, is_cut, is_self, query
    )


def dropout_of(layer: Any, training: bool | None) -> dict[str, Any]:
    """The fields of a `Request` for a layer's attention dropout; none outside of training."""
    if not (layer.dropout > 0 and training):
        return {}
    return {"dropout": layer.dropout, "seed": _keras.dropout_layer(layer).seed_generator}


def checked_tiled(tiled: Any) -> bool | None:
    if tiled is None or isinstance(tiled, bool):
        return tiled
    raise TypeError(f"`tiled` must be True, False or None. Received: {tiled!r}.")


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
    tensors = attention_mask, query_mask, value_mask, key_mask
    as_inputs = attention_mask, (query_mask, None), (None, value_mask), (None, key_mask)
    for leaf, mask, as_input in zip(_FROM_OUTSIDE, tensors, as_inputs, strict=True):
        if mask is not None:
            specs.append(leaf)
            inputs[leaf.input] = as_input
    joined = [x for x in (*specs, window) if x is not None]
    return (functools.reduce(operator.and_, joined) if joined else None), inputs
