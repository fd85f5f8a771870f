"""20 steps of `fit` on one device and on two under `MirroredStrategy` end with the same weights.

`test_workers.py` runs it.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_headmask as hm

ROWS, BATCH, LENGTH = 160, 8, 12
RULE = hm.PerHead(
    {0: hm.SameSentence(9), 1: hm.SameSegment("segment_ids")},
    default=hm.Window(before=1, after=1),
)


def data():
    rng = np.random.default_rng(0)
    inputs = {
        "token_ids": rng.integers(1, 20, (ROWS, LENGTH)).astype("int32"),
        "segment_ids": rng.integers(0, 3, (ROWS, LENGTH)).cumsum(1).astype("int32"),
    }
    return inputs, rng.integers(0, 2, ROWS)


def model():
    """A layer of ours, and one of stock under the rule."""
    inputs = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in data()[0]}
    x = keras.layers.Embedding(20, 16)(inputs["token_ids"])
    ours = hm.PerHeadMaskedMultiHeadAttention(num_heads=4, key_dim=4, mask_spec=RULE)
    x = ours(x, mask_inputs=inputs)
    x = keras.layers.MultiHeadAttention(num_heads=4, key_dim=4, name="stock")(x, x)
    x = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x))
    return hm.apply_head_masks(keras.Model(inputs, x), RULE, layers="stock")


def trained(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        made = model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    before = made.get_weights()
    made.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    assert made.optimizer.iterations.numpy() == ROWS / BATCH
    return before, made.get_weights()


def largest(some, others):
    return max(abs(a - b).max() for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    cpu, two = tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()]
    tf.config.set_logical_device_configuration(cpu, two * 2)
    before, expected = trained(tf.distribute.get_strategy())
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    _, weights = trained(strategy)
    assert largest(expected, before) > 1e-2
    assert largest(weights, expected) < 1e-5
