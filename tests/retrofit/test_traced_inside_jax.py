"""JAX keeps what `keras.remat`, `ops.cond` and loops traced: no rule may be left out of a trace."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX alone keeps them")


class Block(layers.Layer):
    """Calls its attention in a function of its own, made anew in each call."""

    how = "plain"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        def attend(x):
            return self.attention(x, x)

        if self.how == "remat":
            return keras.remat(attend)(x)
        if self.how == "cond":
            return ops.cond(ops.sum(x) > -1e9, lambda: attend(x), lambda: x)
        if self.how == "while_loop":
            return ops.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, attend(x)), (0, x))[1]
        return attend(x)


class WithSpec(Block):
    """Says its shapes itself, so that Keras does not run it for them."""

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def masked(kind):
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    keras.utils.set_random_seed(0)
    x = layers.Embedding(20, 8)(ids)
    model = keras.Model(ids, kind(name="block")(x))
    return hm.apply_head_masks(
        model, hm.PerHead({0: hm.SameSentence(9)}), copy=False, ignore="block"
    )


@pytest.mark.parametrize("kind", [Block, WithSpec])
@pytest.mark.parametrize("how", ["remat", "cond", "while_loop"])
def test_attention_in_a_function_that_jax_traces(how, kind, monkeypatch):
    plain = masked(WithSpec)
    texts = [np.array([ids]) for ids in ([1, 2, 9, 3, 4, 5], [1, 9, 2, 3, 4, 5])]
    wanted = [plain.predict(ids, verbose=0) for ids in texts]
    monkeypatch.setattr(Block, "how", how)
    model = masked(kind)
    for ids, output in zip(texts, wanted, strict=True):
        assert_close(model.predict(ids, verbose=0), output)
        assert_close(ops.convert_to_numpy(model(ids)), output)


@pytest.mark.parametrize("how", ["remat", "cond", "while_loop"])
def test_the_error_where_shapes_are_inferred_names_the_way_out(how, monkeypatch):
    monkeypatch.setattr(Block, "how", how)
    with pytest.raises(RuntimeError, match=r"keras\.remat.*define `compute_output_spec`"):
        masked(Block)(keras.Input((6,), batch_size=1, dtype="int32"))
