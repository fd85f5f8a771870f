"""A function that is compiled, or that JAX traces, keeps what it traced first: with the rule."""

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from small_models import CHUNK, TOKENS, apply, of_vectors, one_layer
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import scopes

BACKEND = keras.backend.backend()
RULES = {"ids": hm.SameSentence(9), "positions": CHUNK}


def compiled(function):
    """What a user of this backend compiles a function with."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    import torch

    return torch.compile(function, backend="eager")


# --- Around a masked model: traced first for shapes, with the rule --------------------------------


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


def after_shapes(inner):
    model = Classifier(inner)
    model.compute_output_spec(keras.KerasTensor((2, 7), "int32"))
    return model


MAKES = {
    "method": Classifier,
    "call": Compiled,
    "functional": functional,
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
if BACKEND == "tensorflow":
    CASES += [(make, "positions", "call") for make in MAKES]
    CASES += [("method", rule, first) for rule in RULES for first in USES[1:]]
    CASES += [(make, "ids", first) for make, first in zip(list(MAKES)[1:], USES[2:], strict=True)]


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


@pytest.mark.skipif(BACKEND == "torch", reason="torch.compile keeps no such trace")
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
    tensors = [ops.ones((2, 7, 8)), ops.ones((2, 7))]
    with pytest.raises((ValueError, TypeError), match=message):
        layer.compute_output_spec([keras.KerasTensor(x.shape, x.dtype) for x in tensors])
    with pytest.raises((ValueError, TypeError), match=message):
        layer(tensors)


@pytest.mark.tensorflow
def test_a_run_without_rules_leaves_no_trace():
    inner = hm.apply_head_masks(one_layer(mask_zero=False), CHUNK)
    own = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=CHUNK)
    for layer, given in ((inner, TOKENS), (own, keras.random.normal((2, 7, 8)))):
        encodes = Encodes(layer)
        with scopes.rules_off(), pytest.raises(RuntimeError, match=r"`tf.function` of its own"):
            encodes(given)
        assert_close(encodes(given), layer(given))


# --- Inside a masked model: refused, unless it is made anew in each call --------------------------


class Block(layers.Layer):
    """Calls its attention directly, or in a function of its own."""

    def __init__(self, how="plain", **kwargs):
        super().__init__(**kwargs)
        self.how = how
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")
        self.function = compiled(lambda x: self.attention(x, x))

    def build(self, shape):
        self.attention.build(shape, shape)
        if "of old" in self.how:
            self.function(ops.zeros((2, 7, 8)))

    def call(self, x):
        def attend(x):
            return self.attention(x, x)

        if self.how == "remat":
            return keras.remat(attend)(x)
        if self.how == "cond":
            return ops.cond(ops.sum(x) > -1e9, lambda: attend(x), lambda: x)
        if self.how == "while_loop":
            return ops.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, attend(x)), (0, x))[1]
        direct = attend(x) if "plain" in self.how else 0.0
        if "in eager mode" in self.how and not hasattr(x, "numpy"):
            return attend(x)
        return self.function(x) + direct if "function" in self.how else direct


class Whole(keras.Model):
    """A subclassed model, of which no graph shows what it calls."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return self.block(x)


def one(how):
    return of_vectors(lambda x: Block(how, name="block")(x))


IN_FUNCTION = r"is called in a `tf.function` inside the model"


@pytest.mark.tensorflow
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    "how", ["function", "function of old", "plain, and function", "plain, and function of old"]
)
def test_a_function_that_calls_attention_is_refused(how, copy):
    model = one(how)
    with pytest.raises(ValueError, match=IN_FUNCTION):
        apply(model, CHUNK, layers="attention", copy=copy)
    model(normal(2, 7, 8))  # and is as it was


@pytest.mark.tensorflow
@pytest.mark.parametrize("how", ["function of old", "plain, and function of old"])
def test_a_function_of_old_in_a_subclassed_model_is_found_among_attributes(how):
    model, given = Whole(Block(how, name="self")), normal(2, 7, 8)
    model(given)
    with pytest.raises(ValueError, match=IN_FUNCTION):
        apply(model, CHUNK, copy=False, layers="attention")
    plain = Whole(Block("plain", name="self"))  # has such a function, which nobody called
    plain.block.twice = compiled(lambda x: 2 * x)  # and one that attends to nothing
    plain.block.twice(plain(given))
    apply(plain, CHUNK, copy=False, layers="attention")(given)


@pytest.mark.skipif(BACKEND != "jax", reason="it keeps traces, and shows none")
def test_a_function_of_old_in_a_subclassed_model_is_missed():
    model, given = Whole(Block("function of old", name="self")), normal(2, 7, 8)
    model(given)
    apply(model, CHUNK, copy=False, layers="attention")
    with pytest.raises(RuntimeError, match="it ran in a function that was compiled before"):
        model(given)


@pytest.mark.tensorflow
def test_a_function_that_shows_only_in_the_forward_is_refused_there():
    given = normal(2, 7, 8)
    by_ids = apply(
        one("function in eager mode"), hm.SameSegment("ids"), copy=False, add_inputs=True
    )
    with pytest.raises(RuntimeError, match=IN_FUNCTION):
        by_ids([given, np.zeros((2, 7), "int32")])
    model = apply(one("function in eager mode"), CHUNK, copy=False)
    first = numpy(model(given))
    with pytest.raises(RuntimeError, match="it ran in a function that was compiled before"):
        model(given)
    assert_close(model.predict(given, verbose=0), first, depth=3)  # a graph of the whole model


class WithSpec(Block):
    """Says its shapes itself, so that Keras does not run it for them."""

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


TRACED = ["while_loop"] if BACKEND == "tensorflow" else ["remat", "cond", "while_loop"]


def masked(block):
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    keras.utils.set_random_seed(0)
    model = keras.Model(ids, block(layers.Embedding(20, 8)(ids)))
    return apply(model, hm.PerHead({0: hm.SameSentence(9)}), copy=False)


@pytest.mark.skipif(BACKEND == "torch", reason="it keeps no traces")
@pytest.mark.parametrize("kind", [Block, WithSpec])
@pytest.mark.parametrize("how", TRACED)
def test_attention_in_a_function_that_is_made_anew_in_each_call(how, kind):
    plain, model = masked(WithSpec()), masked(kind(how))
    for ids in ([1, 2, 9, 3, 4, 5], [1, 9, 2, 3, 4, 5]):
        given = np.array([ids])
        output = plain.predict(given, verbose=0)
        assert_close(model.predict(given, verbose=0), output)
        assert_close(numpy(model(given)), output)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone keeps such traces")
@pytest.mark.parametrize("how", TRACED)
def test_the_error_where_shapes_are_inferred_names_the_way_out(how):
    with pytest.raises(RuntimeError, match=r"keras\.remat.*define `compute_output_spec`"):
        masked(Block(how))(keras.Input((6,), batch_size=1, dtype="int32"))
