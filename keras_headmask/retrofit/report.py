"""What the attention layers of a model obey: any model, one that was cut or extended, too."""

from collections.abc import Callable
from typing import Any

import keras

from keras_headmask.retrofit.finding import aligned, find_attention, numbered
from keras_headmask.retrofit.masked_layer import spec_of
from keras_headmask.rules.base import MaskSpec


def mask_specs(model: keras.Model) -> dict[str, MaskSpec]:
    """The rule of each attention layer of `model` that has one, by the path of the layer.

    Args:
        model: Any Keras model: a masked one, one built on its layers or its tensors, one that holds
            it, or one with layers of `PerHeadMaskedMultiHeadAttention`.

    Returns:
        All that a layer obeys, as one spec: its own rule and those of `apply_head_masks`.

    >>> import keras_headmask as hm
    >>> x = keras.Input((None, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> mask_specs(hm.apply_head_masks(model, hm.Window(1, 1)))
    {'attention': Window(before=1, after=1)}
    """
    specs = {entry.path: spec_of(entry.layer) for entry in find_attention(model).known}
    return {path: spec for path, spec in specs.items() if spec is not None}


def summary_masks(model: keras.Model, print_fn: Callable[[str], Any] = print) -> None:
    """Print each attention layer: number, path, class, heads, self, cross or unclear, rule.

    The numbers are those by which `layers` of `apply_head_masks` names self-attention.

    Args:
        model: Any Keras model.
        print_fn: Called with each line.
    """
    rows = []
    for number, entry in numbered(find_attention(model)):
        heads = f"{'?' if entry.num_heads is None else entry.num_heads} heads"
        place = "-" if number is None else str(number)
        spec = repr(spec_of(entry.layer))
        rows.append((place, entry.path, type(entry.layer).__name__, heads, entry.kind, spec))
    for line in aligned(rows):
        print_fn(line)
