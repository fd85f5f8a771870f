"""Where a graph loses a Keras mask, so that attention behind it sees padding.

Keras passes a mask from layer to layer. Operators and `keras.ops` drop it without a word.
"""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.evaluation import make_mask

# Operators, and the layers that do the same and pass the mask on.
_OPERATORS = {"Add": "+", "Subtract": "-", "Multiply": "*", "Maximum": "", "Minimum": ""}
_MERGING = tuple(getattr(keras.layers, name) for name in (*_OPERATORS, "Average", "Concatenate"))
# Their output has the shape of the input, and axis 1 need not be its positions.
_MOVE_AXES = ("Transpose", "Swapaxes", "Moveaxis")
# Of two tensors these make positions of the second.
_PICK = ("Matmul", "Einsum", "Dot", "Tensordot", "Take", "TakeAlongAxis")
_LENGTH, _REAL = 16, 2**20 + 7  # an id that no rule names

_warned: weakref.WeakSet = weakref.WeakSet()  # each operation is named once


class Lost(NamedTuple):
    """A mask that is lost: the operation that drops it, and the model's input of ids, if known."""

    operation: Any
    ids: str | None
    others_have_one: bool = True  # or another operand never had a mask
    is_of_one: bool = False  # the other operand is a number


class _Mask(NamedTuple):
    """Whether a tensor carries a Keras mask when the graph runs, or where it was lost."""

    is_there: bool = False
    ids: str | None = None
    lost: Lost | None = None


def lost_mask(tensor: Any) -> Lost | None:
    """Where the Keras mask of a symbolic tensor was lost; `None` if it has one or never had."""
    mask_of: dict[int, _Mask] = {}
    for one in _keras.made_of([tensor]):
        operation, read = _keras.made_by(one)
        mask_of[id(one)] = _after(one, operation, read, mask_of)
        if _keras.takes_masks_off(operation):
            for x in read:
                if mask_of[id(x)].is_there:
                    mask_of[id(x)] = _Mask(lost=Lost(operation, mask_of[id(x)].ids))
    return mask_of[id(tensor)].lost


def _after(tensor: Any, operation: Any, read: list[Any], mask_of: dict[int, _Mask]) -> _Mask:
    """The mask of `tensor`, which `operation` makes of the tensors `read`."""
    is_layer = isinstance(operation, keras.Layer)
    joins = not is_layer or isinstance(operation, _MERGING)
    # Other layers pass on the mask of their first argument, or use it up, as a pooling does, or
    # destroy it, of which Keras warns.
    sources = [x for x in (read if joins else read[:1]) if _share_a_sequence(x, tensor)]
    name = type(operation).__name__
    if not is_layer and (name in _MOVE_AXES or (name in _PICK and len(read) > 1)):
        sources = []
    before = [mask_of[id(x)] for x in sources]
    lost = next((mask.lost for mask in before if mask.lost is not None), None)
    if _keras.get_keras_mask(tensor) is not None:
        expected = [x for x in sources if _keras.get_keras_mask(x) is not None]
        if expected and not all(mask_of[id(x)].is_there for x in expected):
            return _Mask(lost=lost)
        ids = next((mask.ids for mask in before if mask.is_there), None)
        return _Mask(True, ids if expected else _name_of_input(read))
    inner = _keras.functional_of(operation)
    if isinstance(inner, _keras.Functional) and len(inner.outputs) == 1:
        inside = lost_mask(inner.outputs[0])
        if inside is not None:
            return _Mask(lost=inside._replace(ids=None))  # its inputs have names of their own
    there = [mask for mask in before if mask.is_there]
    if there and joins and (lost is None or _keras.takes_masks_off(lost.operation)):
        ids = None if name in ("GetItem", *_PICK) else there[0].ids  # those have another length
        return _Mask(lost=Lost(operation, ids, len(there) == len(read), len(read) == 1))
    return _Mask(lost=lost if joins or not there else None)


def _share_a_sequence(one: Any, other: Any) -> bool:
    """Whether the first two axes, of the batch and the positions, are alike."""
    return min(len(one.shape), len(other.shape)) > 1 and one.shape[:2] == other.shape[:2]


def _name_of_input(read: list[Any]) -> str | None:
    """The input of the model that `read` is, if it is one."""
    operation = _keras.made_by(read[0])[0] if len(read) == 1 else None
    return operation.name if isinstance(operation, keras.layers.InputLayer) else None


def marks_padding(name: str) -> bool:
    """Whether a mask input has a name that says it is true at real tokens.

    KerasHub's names are `padding_mask`, `decoder_padding_mask` and so on, Hugging Face's is
    `attention_mask`. PyTorch's `key_padding_mask` is true at padding, so its name says nothing.
    """
    is_padding = "padding_mask" in name and "key_padding_mask" not in name
    return is_padding or name == "attention_mask"


def padding_inputs(inputs: Mapping[str, Any]) -> list[str]:
    """The names of `inputs` that are true at real tokens: of `(batch, length)`, and named so."""
    return [name for name, x in inputs.items() if len(x.shape) == 2 and marks_padding(name)]


def hides_padding(spec: MaskSpec, num_heads: int) -> bool:
    """Whether a rule hides padding by itself: keys of id 0, on either side of the real tokens."""
    kinds = {name: kind for leaf in leaves(spec) for name, kind in leaf.inputs.items()}
    if not kinds or any(kind.rank is None for kind in kinds.values()):
        return bool(kinds)  # a whole mask may hold anything
    is_real = np.arange(_LENGTH) < _LENGTH // 2
    is_real = np.stack([is_real, ~is_real])
    inputs = {
        name: is_real if kind.dtype == "bool" else np.where(is_real, _REAL, 0).astype("int32")
        for name, kind in kinds.items()
    }
    mask = ops.convert_to_numpy(make_mask(spec, _LENGTH, _LENGTH, num_heads, inputs))
    return not (mask & is_real[:, None, :, None] & ~is_real[:, None, None, :]).any()


def warn_in_call(layer: Any, query: Any, value: Any, arguments: Mapping[str, Any]) -> None:
    """Warn where the graph lost the mask of the keys, and nothing else hides padding.

    `layer` is one of ours; `arguments` are those of its call on symbolic tensors.
    """
    keras_mask = _keras.get_keras_mask(value)  # Keras fills the arguments with it
    of_query = ("query_mask", "mask") if value is query else ()
    passed = (arguments[name] for name in ("attention_mask", "value_mask", "key_mask", *of_query))
    if any(mask is not None and mask is not keras_mask for mask in passed):
        return
    spec, lost = layer.mask_spec, lost_mask(value)
    if lost is None or (spec is not None and hides_padding(spec, layer.num_heads)):
        return
    name = "query_mask" if value is query else "value_mask"
    ways = f"Pass `{name}=` to the attention, or let its rule hide padding: `{{padding}}`."
    warn(f"The attention layer '{layer.name}'", lost, ways)


def warn(attention: str, lost: Lost, ways: str, stacklevel: int = 2) -> None:
    """Say once of each operation which attention it leaves without a mask, and what to do."""
    if lost.operation in _warned:
        return
    _warned.add(lost.operation)
    ids = "" if lost.ids is None else repr(lost.ids)
    ways = ways.format(padding=f"hm.recipes.padding({ids})")
    warnings.warn(
        f"{attention} attends to padding: the Keras mask is lost before it. "
        f"{explained(lost, ways)}",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def explained(lost: Lost, ways: str) -> str:
    """Which operation loses a mask, and what to do: mend it, or `ways`, a sentence."""
    why, way = _reason(lost)
    return f"{why} {way + ways[0].lower() if way else ways[0]}{ways[1:]}"


def _reason(lost: Lost) -> tuple[str, str]:
    """Which operation loses the mask; and how to mend it, the start of a sentence, or nothing."""
    operation, kind = lost.operation, type(lost.operation).__name__
    name = f"'{operation.name}'"
    if _keras.takes_masks_off(operation):
        return f"The stock attention {name} takes the mask off its inputs when it runs.", ""
    if isinstance(operation, keras.Layer):
        why = f"The layer {name} ({kind}) drops it, since another of its inputs has none."
        return why, "Give all its inputs the mask, "
    if kind not in _OPERATORS:
        why = f"The operation {name} drops it, as all of `keras.ops` do."
        return why, "Use a layer of Keras that does the same, "
    sign = f"`{_OPERATORS[kind]}`, " if _OPERATORS[kind] else ""
    written = f"The operation {name} ({sign}`keras.ops.{kind.lower()}`)"
    if not lost.others_have_one:
        why = f"`keras.layers.{kind}()` would, too, since another operand has no mask."
        return f"{written} drops it. {why}", ""
    layer = "Rescaling" if lost.is_of_one else kind
    return f"{written} drops it.", f"Use `keras.layers.{layer}()` in its place, "
