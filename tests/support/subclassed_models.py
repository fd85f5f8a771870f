"""Subclassed models around a layer of ours or a masked backbone; layers are built as they run."""

import keras
import numpy as np
from contract import normal
from keras import layers

import keras_headmask as hm

RULE = hm.PerHead({0: hm.SameSentence(9)}, default=hm.Window(2, 2))
IDS = np.array([[5, 9, 4, 6, 9, 7, 3], [4, 4, 9, 8, 3, 5, 6]], "int32")
X = normal(2, 7, 8)

registered = keras.saving.register_keras_serializable("subclassed_models")


def attention():
    return hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=RULE)


@registered
class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.norm = attention(), layers.LayerNormalization()
        self.dense = layers.Dense(8)

    def call(self, x, ids):
        return self.dense(self.norm(x + self.attention(x, mask_inputs={"token_ids": ids})))


@registered
class OfBlocks(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.head = layers.Embedding(12, 8), layers.Dense(3)
        self.blocks = [Block(), Block()]

    def call(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, ids)
        return self.head(x)


@registered
class OverABackbone(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        ids = keras.Input((None,), dtype="int32", name="token_ids")
        x = layers.Embedding(12, 8)(ids)
        stock = keras.Model({"token_ids": ids}, layers.MultiHeadAttention(2, 4)(x, x))
        self.backbone = hm.apply_head_masks(stock, RULE & hm.MaskInput("mask"), add_inputs=True)
        self.head = layers.Dense(3)

    def call(self, inputs):
        return self.head(self.backbone(inputs))


@registered
class OfAnArgument(keras.Model):
    """The mask inputs are an argument of their own, of which Keras files no shape."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.head = attention(), layers.Dense(3)

    def call(self, x, mask_inputs=None):
        return self.head(self.attention(x, mask_inputs=mask_inputs))


@registered
class OfAnOption(keras.Model):
    """The ids are an optional argument, which Keras leaves out when it builds what it loads."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.before, self.attention, self.head = layers.Dense(8), attention(), layers.Dense(3)

    def call(self, x, token_ids=None):
        return self.head(self.attention(self.before(x), mask_inputs={"token_ids": token_ids}))


@registered
class Unbuildable(OfAnArgument):
    def call(self, x, mask_inputs=None):
        return super().call(x, {"token_ids": mask_inputs["token_ids"]})


SHAPES = {
    OfBlocks: [IDS],
    OverABackbone: [{"token_ids": IDS, "mask": np.tril(np.ones((2, 2, 7, 7), bool), 3)}],
    OfAnArgument: [X, {"token_ids": IDS}],
    OfAnOption: [X, IDS],
}
