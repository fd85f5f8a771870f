"""Examples of mask inputs, in NumPy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import as_pair


def sides_of(value: Any) -> list[np.ndarray | None]:
    """A mask input in NumPy: one tensor, or its sides of the queries and of the keys."""
    pair = as_pair(value)
    sides = (value,) if pair is None else pair
    tensors = (ops.convert_to_numpy(side) if hasattr(side, "shape") else side for side in sides)
    return [None if side is None else np.asarray(side) for side in tensors]


def key_side(value: Any) -> np.ndarray | None:
    """The key side of a mask input, if it is `(batch, length)`."""
    side = sides_of(value)[-1]
    return None if side is None or side.ndim != 2 else side


def length_of(spec: MaskSpec, mask_inputs: Mapping[str, Any], side: int) -> int | None:
    """How many queries (side 0) or keys (side -1) the examples that `spec` reads speak of."""
    for name, kind in spec.inputs.items():
        tensor = sides_of(mask_inputs[name])[side] if name in mask_inputs else None
        if tensor is not None and (kind.rank is None or tensor.ndim == 2):
            size = tensor.shape[-2 - side if kind.rank is None else 1]
            if size > 1 or kind.rank is not None:
                return size
    return None


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
