"""Small models with attention in sight and out of it, and what a rule must make of them."""

import functools

import keras
import numpy as np
from contract import by_hand, normal, numpy, random_biases
from keras import layers
from oracle import mask as mask_by_loops

import keras_headmask as hm

TOKENS = np.array([[5, 9, 4, 6, 9, 7, 0], [4, 4, 9, 8, 3, 0, 0]], "int32")  # 0 pads, 9 ends
PARTS = np.array([[0, 0, 1, 1, 2, 2, 2], [7, 7, 7, 1, 1, 1, 1]], "int32")
CHUNK = hm.Chunk(3)

# For models with layers of ours, which attend by the attention that they hold, and by nothing else.
apply = functools.partial(hm.apply_head_masks, ignore="")


@keras.saving.register_keras_serializable("small_models")
class Block(layers.Layer):
    """A composite layer, as KerasHub's: attention is out of the graph's sight."""

    def __init__(self, attention=None, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(4, 3) if attention is None else attention
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        if not self.attention.built:  # a config builds it
            self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x + self.attention(x, x))

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return super().get_config() | {
            "attention": keras.saving.serialize_keras_object(self.attention)
        }

    @classmethod
    def from_config(cls, config):
        config["attention"] = keras.saving.deserialize_keras_object(config["attention"])
        return cls(**config)


def of_vectors(then, **how):
    """Seven vectors of size 8, and `then`."""
    x = keras.Input((7, 8))
    return keras.Model(x, then(x), **how)


def of_ids(then, length=None, **how):
    """Ids below 12, their embeddings of size 8, and `then`."""
    ids = keras.Input((length,), dtype="int32", name="token_ids")
    return keras.Model(ids, then(layers.Embedding(12, 8)(ids)), **how)


def one_layer(mask_zero=True, **arguments):
    """Token ids -> embedding with its Keras mask -> one attention layer."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=mask_zero, name="embedding")(ids)
    attention = layers.MultiHeadAttention(4, 3, name="attention", **arguments)
    model = keras.Model(ids, attention(x, x), name="small")
    model.get_layer("embedding").set_weights([normal(12, 8)])
    random_biases(attention)
    return model


def stack(count=3, **inputs):
    """Token ids -> embedding -> blocks, each with an attention layer of its own."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    for i in range(count):
        x = Block(name=f"block_{i}")(x)
    return keras.Model(ids, x, name="stack")


def by_loops(model, spec, inputs=None, padding=True):
    """What `one_layer` must give under `spec`, from its weights, in NumPy loops."""
    x = numpy(model.get_layer("embedding")(TOKENS))
    allowed = mask_by_loops(spec, 2, 4, 7, 7, inputs or {})
    if padding:
        real = TOKENS != 0
        allowed = allowed & real[:, None, None, :] & real[:, None, :, None]
    return by_hand(model.get_layer("attention"), x, mask=allowed)[0]


def leak(model, inputs=None, position=1, rows=slice(3, None)):
    """How far a change of one token is felt in `rows`."""
    inputs = {"token_ids": TOKENS} | (inputs or {})
    changed = dict(inputs, token_ids=TOKENS.copy())
    changed["token_ids"][:, position] = 11
    before, after = (
        numpy(model(x if len(model.inputs) > 1 else x["token_ids"])) for x in (inputs, changed)
    )
    return abs(before - after)[:, rows].max()
