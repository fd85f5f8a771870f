"""20 steps of `fit` on one device and on two under `MirroredStrategy`; `test_workers.py` runs it.

Prints for each kind of model how far weights moved, and how far apart the two runs end.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_headmask as hm

ROWS, BATCH, LENGTH, FULL_STOP = 160, 8, 12, 9
RULE = hm.PerHead(
    {0: hm.SameSentence(FULL_STOP), 1: hm.SameSegment("segment_ids")},
    default=hm.Window(before=1, after=1),
)


def data():
    rng = np.random.default_rng(0)
    inputs = {
        "token_ids": rng.integers(1, 20, (ROWS, LENGTH)).astype("int32"),
        "segment_ids": rng.integers(0, 3, (ROWS, LENGTH)).cumsum(1).astype("int32"),
    }
    return inputs, rng.integers(0, 2, ROWS)


def built_with_the_layer():
    inputs = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in data()[0]}
    x = keras.layers.Embedding(20, 16)(inputs["token_ids"])
    attention = hm.PerHeadMaskedMultiHeadAttention(num_heads=4, key_dim=4, mask_spec=RULE)
    return keras.Model(inputs, classified(attention(x, mask_inputs=inputs)))


def by_apply_head_masks():
    token_ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(20, 16)(token_ids)
    attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=4)
    stock = keras.Model({"token_ids": token_ids}, classified(attention(x, x)))
    return hm.apply_head_masks(stock, RULE, add_inputs=True)


def classified(x):
    return keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x))


def trained(make, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    before = model.get_weights()
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    assert model.optimizer.iterations.numpy() == 20
    return before, model.get_weights()


def largest(some, others):
    return max(abs(a - b).max() for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    cpu, two = tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()]
    tf.config.set_logical_device_configuration(cpu, two * 2)
    for make in (built_with_the_layer, by_apply_head_masks):
        before, expected = trained(make, tf.distribute.get_strategy())
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        _, weights = trained(make, strategy)
        moved, apart = largest(expected, before), largest(weights, expected)
        print(make.__name__, strategy.num_replicas_in_sync, f"{moved:.1e} {apart:.1e}", flush=True)
