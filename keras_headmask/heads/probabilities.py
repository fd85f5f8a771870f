"""`hm.attention_probabilities`: what each attention layer of a model attends to."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from keras_headmask import masks
from keras_headmask.heads import texts
from keras_headmask.retrofit.adapters import AttentionLayer, without_remat
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey


def attention_probabilities(
    model: keras.Model, inputs: Any, layers: Any = None
) -> dict[str, np.ndarray]:
    """What every attention layer of `model` attends to, in one forward without dropout.

    It needs `batch * heads * queries * keys` numbers for each layer: pass a few texts, and use
    `measure_heads` for many. Other tools take a list of these arrays, BertViz's `head_view` for
    one: `[torch.tensor(x) for x in probabilities.values()]`.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
        layers: Which layers, as in `apply_head_masks`. By default all, cross-attention too.

    Returns:
        Probabilities by the path of the layer, float32 `(batch, heads, queries, keys)`, in the
        order in which the layers run. A layer that runs again has another entry, `"path[1]"`. Each
        row sums to 1, or to 0 where a query sees nothing.

    Raises:
        TypeError: if `model` is not a Keras model, or for floats where it takes ids.
        ValueError: if attention is out of reach, does not run, runs inside a `tf.function` or
            `jit`, or attends over several axes; or if `layers` names no layer.

    >>> from keras_headmask import Window, apply_head_masks
    >>> x = keras.Input((3, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, Window(0, 0))
    >>> attention_probabilities(masked, np.ones((1, 3, 8)))["attention"][0, 0]
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    texts.check_inputs(model, texts.by_name(model, inputs))
    survey = Survey(model)
    return dict(in_numpy(forward(survey, attention_layers(survey, layers), inputs)))


def attention_layers(survey: Survey, layers: Any = None) -> list[AttentionLayer]:
    """Those that `layers` names; by default all that can be observed, if none is out of reach."""
    if layers is None and survey.known and not survey.unknown:
        return survey.known
    return selected(survey, layers)


def forward(survey: Survey, entries: list[AttentionLayer], inputs: Any) -> list[Any]:
    """Run the surveyed model once, as in inference; each run of an attention layer as a `Seen`."""
    from keras_headmask.retrofit.observe import watched  # needs all of retrofit/

    with watched(entries) as seen, without_remat(survey.model), _without_gradients():
        survey.model(inputs, training=False)
    if not seen:
        raise ValueError(
            f"None of the attention layers {[entry.path for entry in entries]} ran when the model "
            "was called with training=False. Pass inputs with which it attends."
        )
    return seen


def in_numpy(seen: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Path and probabilities of each, which is then freed."""
    while seen:
        one = seen.pop(0)
        values = masks.known_values(one.probabilities)
        if values is None:
            raise ValueError(
                f"The attention layer '{one.path}' runs inside a `tf.function` or `jit`, where its "
                "probabilities have no values. Call the layers around it without that."
            )
        if values.ndim != 4:
            raise ValueError(
                f"The attention layer '{one.path}' attends over several axes: its probabilities "
                f"have the shape {values.shape}, not (batch, heads, queries, keys). Leave it out: "
                "name the other layers in `layers`."
            )
        yield one.path, values.astype("float32", copy=False)


def _without_gradients() -> AbstractContextManager[Any]:
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
