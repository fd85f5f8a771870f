"""KerasHub's backbones on random data, with weights that show what leaks."""

import keras
import numpy as np
from backbones import Inside
from contract import numpy


def built(name, arguments):
    """The backbone of that name, and the models among its arguments."""
    import keras_hub

    values = {k: built(*x) if isinstance(x, Inside) else x for k, x in arguments.items()}
    return getattr(keras_hub.models, name)(**values)


TEXT, ANSWER = 8, 6  # tokens, the second of a decoder beside an encoder


def data(model):
    """Tokens (or as many as a picture, or a sound, has) for each input of `model`."""
    rng = np.random.default_rng(1)
    made = {}
    for tensor in model.inputs:
        name = tensor.name
        length, padded = (ANSWER, 1) if name.startswith("decoder") else (TEXT, 2)
        if name.endswith("token_ids"):
            made[name] = rng.integers(2, 28, (2, length)).astype("int32")
        elif name.endswith("padding_mask"):
            made[name] = np.ones((2, length), "int32")
            made[name][1, length - padded :] = 0
        elif name == "segment_ids":
            made[name] = np.array([[0] * 5 + [1] * 3] * 2, "int32")
        elif name == "position_ids":
            made[name] = np.tile(np.arange(length, dtype="int32"), (2, 1))
        elif name == "encoder_features":
            made[name] = rng.normal(size=(2, 16, 4)).astype("float32")
        else:
            made[name] = rng.normal(size=(2, *tensor.shape[1:])).astype("float32")
    return made


def given_to(model):
    """`data`, as `model` takes it."""
    given = data(model)
    return given if isinstance(model.input, dict) else next(iter(given.values()))


def called(model, given):
    outputs = model(given if isinstance(model.input, dict) else next(iter(given.values())))
    outputs = outputs if isinstance(outputs, dict) else {"only": outputs}
    return {name: numpy(value) for name, value in outputs.items()}


def randomised(model, scale=0.2):
    """Larger weights than a fresh model has, so that what leaks is seen."""
    rng = np.random.default_rng(2)
    for weight in model.weights:
        if "float" in keras.backend.standardize_dtype(weight.dtype):
            weight.assign(weight + rng.normal(size=weight.shape).astype("float32") * scale)
    return model


def drawn_by_numpy(model, scale):
    """`randomised` alike on all backends: what a test needs to see then shows on each."""
    for weight in model.weights:
        if len(weight.shape) > 1:  # else the backend drew nothing
            weight.assign(keras.ops.zeros(weight.shape, weight.dtype))
    return randomised(model, scale)
