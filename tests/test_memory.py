"""A model that is gone leaves nothing: no weights, no traced graphs, no registered gradients."""

import contextlib
import gc
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import layers
from tiled_contract import tiles

import keras_headmask as hm

BACKEND = keras.backend.backend()
SENTENCES = hm.PerHead({0: hm.SameSentence(9)})
GROUPS = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(2, 2)})
LENGTHS = (5, 9, 7)  # the second is traced as unknown, and serves the third


def ours(rule=SENTENCES, **more):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    for _ in range(2):
        attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=rule, **more)
        x = layers.Add()([x, attention(x, mask_inputs={"token_ids": ids})])
    return keras.Model(ids, layers.Dense(2)(x))


def retrofitted():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return hm.apply_head_masks(keras.Model(ids, layers.Dense(2)(x)), SENTENCES)


def causal_lm():
    hub = pytest.importorskip("keras_hub").models
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = hub.GPT2Backbone(12, max_sequence_length=9, **sizes)
    return hm.apply_head_masks(hub.GPT2CausalLM(backbone=backbone), SENTENCES)


def projection():
    dense = layers.Dense(4)
    dense.build((None, None, 4))
    return dense


def tokens(length):
    return np.random.default_rng(length).integers(1, 12, (2, length)).astype("int32")


def predict(model):
    for length in LENGTHS:
        model.predict(tokens(length), verbose=0)


def fit(model):
    model.compile("sgd", "mse", jit_compile=False)
    for length in LENGTHS:
        model.fit(tokens(length), np.zeros((2, length, 2)), batch_size=2, verbose=0)


def export(model):
    with tempfile.TemporaryDirectory() as folder:
        hm.export_saved_model(model, folder, check=False)


def compiled(model):
    import tensorflow as tf

    for length in LENGTHS:
        tf.function(model, jit_compile=True)(tokens(length))


def generate(model):
    model.compile(sampler="greedy")
    for length in LENGTHS[:2]:
        given = {"token_ids": tokens(length), "padding_mask": np.ones((2, length), "int32")}
        given["padding_mask"][:, 3:] = 0
        model.generate(given, stop_token_ids=None)


def in_a_function(dense):
    """The function is the caller's own, and is gone with it."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, None, 2, 4]), tf.TensorSpec([None, None])])
    def trained(x, ids):
        with tf.GradientTape() as tape:
            x, ids = dense(x), {"token_ids": tf.cast(ids, tf.int32)}
            loss = tf.reduce_sum(hm.dot_product_attention(x, x, x, None, SENTENCES, ids))
        return tape.gradient(loss, dense.trainable_weights[0].value)

    for length in LENGTHS:
        trained(np.ones((2, length, 2, 4)), tokens(length).astype("float32"))


def second_derivative(model):
    import tensorflow as tf

    @tf.function(autograph=False)
    def derivative(ids):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(model(ids) ** 2)
            (gradient,) = inner.gradient(loss, model.trainable_weights[-2:-1])
        return outer.gradient(gradient, model.trainable_weights[0].value)

    for length in LENGTHS[:2]:
        derivative(tokens(length))


ROUTES = {
    "fit, tiles of head groups": (lambda: ours(GROUPS), fit, tiles),
    "retrofitted": (retrofitted, predict, contextlib.nullcontext),
}
TENSORFLOW = {
    "export": (ours, export, contextlib.nullcontext),
    "XLA": (ours, compiled, contextlib.nullcontext),
    "fit, dense, dropout": (lambda: ours(dropout=0.2, tiled=False), fit, contextlib.nullcontext),
    "second derivative": (ours, second_derivative, tiles),
    "generation": (causal_lm, generate, contextlib.nullcontext),
    "in a function": (projection, in_a_function, contextlib.nullcontext),
}
LONG = ("fit, dense, dropout", "XLA", "second derivative", "in a function")
ALL = [
    pytest.param(
        *route,
        id=name,
        marks=[
            *([pytest.mark.tensorflow] if name in TENSORFLOW else []),
            *([pytest.mark.long] if name in LONG else []),
        ],
    )
    for name, route in (ROUTES | TENSORFLOW).items()
]


def memory_of(weight):
    """What holds the numbers of a weight, and lives as long as they do."""
    return weight.value.handle if BACKEND == "tensorflow" else weight.value


def kept():
    """What TensorFlow holds of what was traced: gradients by name, graphs, functions."""
    gc.collect()
    if BACKEND != "tensorflow":
        return ()
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.func_graph import FuncGraph

    graphs = sum(isinstance(x, FuncGraph) for x in gc.get_objects())
    functions = len(context.context().list_function_names())
    return len(ops.gradient_registry.list()), graphs, functions


def gone(make, use):
    """What is alive of a model after its end: (its weights, what Keras and TensorFlow hold)."""
    model = make()
    use(model)
    weights = [weakref.ref(memory_of(weight)) for weight in model.weights]
    assert weights
    del model
    keras.backend.clear_session()
    left = kept()
    return sum(weight() is not None for weight in weights), left


@pytest.mark.parametrize(("make", "use", "scope"), ALL)
def test_a_model_that_is_gone_leaves_nothing(make, use, scope):
    with scope():
        weights, before = gone(make, use)  # and what is made once
        assert weights == 0
        assert gone(make, use) == (0, before)


@pytest.mark.long
@pytest.mark.tensorflow  # (elsewhere `kept` sees nothing, and JAX compiles for each length)
def test_a_model_that_lives_long_does_not_grow():
    """With lengths, batches and threads."""
    model = ours(GROUPS)

    def at(size):
        ids = np.repeat(tokens(3 + size), 1 + size % 3, axis=0)
        model(ids)
        model.predict(ids, verbose=0, batch_size=1 + size % 4)

    def all_of(sizes):
        for size in sizes:
            at(size)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda size: model(tokens(3 + size)), sizes))
        return kept()

    before = all_of(range(12))  # (each number of batches has an operation of TensorFlow's own)
    assert all_of(range(12, 20)) == before
