"""In a user's `tf.function`, AutoGraph rewrites the user's code alone, none of this package's."""

import dataclasses
import inspect

import keras
import pytest

import keras_headmask as hm

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow
seen = []


@hm.register_spec("test_autograph_sees")
@dataclasses.dataclass(frozen=True)
class Sees(hm.MaskSpec):
    """Every key, and notes how many functions on the stack AutoGraph has rewritten."""

    def allowed(self, query_positions, key_positions, inputs):
        files = {frame.filename for frame in inspect.stack(0)}
        seen.append(sum("__autograph_generated_file" in file for file in files))
        return key_positions >= query_positions * 0


@keras.saving.register_keras_serializable("test_autograph")
class Stock(keras.layers.MultiHeadAttention):
    """Attention that a model has."""


def _tiled(x):
    return hm.dot_product_attention(x, x, x, mask_spec=Sees() & hm.Window(2, 2), tiled=True)


def _layer(x):
    return layers["ours"](x[:, :, 0])


def _masked_layer(x):
    return layers["masked"](x[:, :, 0])


layers = {}


@pytest.fixture(autouse=True)
def _layers():
    x = keras.Input((6, 4))
    layers["ours"] = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=Sees())
    layers["ours"].build((1, 6, 4))
    model = hm.apply_head_masks(keras.Model(x, Stock(2, 4, name="stock")(x, x)), Sees())
    layers["masked"] = lambda x: model(x)
    seen.clear()  # (making the model asks the rule, too)


@pytest.mark.parametrize("call", [_tiled, _layer, _masked_layer])
def test_autograph_rewrites_the_users_function_alone(call):
    attend = tf.function(lambda x: call(x))  # (a lambda, and `call`, which it calls)
    attend(tf.ones((1, 6, 2, 4)))
    assert seen, "the rule was not asked"
    assert min(seen) > 0  # the lambda, `call`, and what `call` makes
    assert max(seen) <= 3
