"""Functions that a user compiles keep what they traced first, even while Keras infers shapes."""

import keras
import numpy as np
import pytest
from contract import numpy
from keras import layers
from small_models import CHUNK, TOKENS, one_layer
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import scopes

RULES = {"ids": hm.SameSentence(9), "positions": CHUNK}


def compiled(function):
    """What a user of this backend compiles a function with."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import torch

    return torch.compile(function, backend="eager")


class Encodes(layers.Layer):
    """Runs a masked model in a compiled function, and may have a layer that is not built yet."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.encode = compiled(lambda ids: inner(ids))

    def call(self, ids):
        return self.encode(ids)


class Classifier(keras.Model):
    """Has a head that is not built yet, so Keras runs `call` for shapes first."""

    def __init__(self, inner):
        super().__init__()
        self.encodes, self.head = Encodes(inner), layers.Dense(2)

    def call(self, ids):
        return self.head(self.encodes(ids))


class Compiled(keras.Model):
    """`call` itself is compiled."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, layers.Dense(2)
        self.compiled_call = compiled(lambda ids: self.head(inner(ids)))

    def call(self, ids):
        return self.compiled_call(ids)


def functional(inner):
    ids = keras.Input((7,), dtype="int32")
    return keras.Model(ids, layers.Dense(2)(Encodes(inner)(ids)))


def sequential(inner):
    return keras.Sequential([keras.Input((7,), dtype="int32"), Encodes(inner), layers.Dense(2)])


def after_shapes(inner):
    model = Classifier(inner)
    model.compute_output_spec(keras.KerasTensor((2, 7), "int32"))
    return model


MAKES = {
    "method": Classifier,
    "call": Compiled,
    "functional": functional,
    "sequential": sequential,
    "compute_output_spec": after_shapes,
}


def use(model, name):
    """What a new model gives in one way: outputs, or the loss against 0."""
    zeros = np.zeros((*TOKENS.shape, 2), "float32")
    if name == "call":
        return numpy(model(TOKENS))
    if name == "predict":
        return model.predict(TOKENS, verbose=0)
    if name == "fit":
        return model.fit(TOKENS, zeros, verbose=0).history["loss"][0]
    return {"evaluate": model.evaluate, "train_on_batch": model.train_on_batch}[name](TOKENS, zeros)


USES = ["call", "predict", "evaluate", "train_on_batch", "fit"]
CASES = [(make, "ids", "call") for make in MAKES]
# (JAX' trainer makes tracers of variables, which a function that is compiled inside cannot keep.)
if keras.backend.backend() == "tensorflow":
    CASES += [(make, "positions", "call") for make in MAKES]
    CASES += [("method", rule, first) for rule in RULES for first in USES[1:]]
    CASES += [(make, "ids", first) for make, first in zip(list(MAKES)[1:], USES[1:], strict=True)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # (of a layer built in a function)
@pytest.mark.parametrize(("make", "rule", "first"), CASES)
def test_what_is_traced_for_shapes_first_has_the_rule(make, rule, first):
    inner = hm.apply_head_masks(one_layer(mask_zero=False), RULES[rule])
    model = MAKES[make](inner)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    got = use(model, first)
    head = next(x for x in model._flatten_layers() if type(x) is layers.Dense)
    assert_close(use(model, "call"), expected := numpy(head(inner(TOKENS))), depth=3)
    assert_close(got, expected if np.ndim(got) else np.square(expected).mean(), depth=3)


class Reads(layers.Layer):
    """Our layer in a compiled function, which gives it `mask_inputs` or leaves them out."""

    def __init__(self, given):
        super().__init__()
        self.attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.SameSegment("ids"))
        self.attend = compiled(lambda x, ids: self.attention(x, mask_inputs=given(ids)))

    def call(self, tensors):
        return self.attend(*tensors)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch.compile keeps no such trace")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda ids: None, r"every input the mask spec reads; \['ids'\] missing"),
        (lambda ids: {"ids": ids}, "dtype=.int32."),
    ],
    ids=["left out", "floats"],
)
def test_what_shape_inference_forgives_no_function_keeps(given, message):
    layer = Reads(given)
    layer.attention.build((2, 7, 8))
    tensors = [keras.ops.ones((2, 7, 8)), keras.ops.ones((2, 7))]
    with pytest.raises((ValueError, TypeError), match=message):
        layer.compute_output_spec([keras.KerasTensor(x.shape, x.dtype) for x in tensors])
    with pytest.raises((ValueError, TypeError), match=message):
        layer(tensors)


@pytest.mark.tensorflow
def test_a_run_without_rules_leaves_no_trace():
    inner = hm.apply_head_masks(one_layer(mask_zero=False), CHUNK)
    own = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=CHUNK)
    x = keras.random.normal((2, 7, 8))
    for layer, given in ((inner, TOKENS), (own, x)):
        encodes = Encodes(layer)
        with scopes.rules_off(), pytest.raises(RuntimeError, match=r"`tf.function` of its own"):
            encodes(given)
        assert_close(encodes(given), layer(given))
