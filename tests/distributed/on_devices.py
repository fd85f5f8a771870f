"""A program on JAX with eight virtual devices: prints what the test named by its argument asks for.

It is started by `test_devices.py`, which asserts. Facts are one JSON object on the last line.
"""

import json
import math
import re
import sys

import jax
import keras
import numpy as np

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

HEADS, SIZE, DIM, LENGTH, BATCH = 8, 2, 16, 96, 4
# Heads of one rule stand on several devices, and two rules on one.
FAR = hm.PerHead(
    {0: hm.SameSentence(9), "1-2,6": hm.Window(3, 0), 4: hm.QueryFlag("flag") | hm.Window(1, 1)}
)
# All of it near the diagonal, so that there are tiles to skip.
NEAR = hm.PerHead(
    {0: hm.SameSentence(9) & hm.Window(9, 9), "1-2,6": hm.Window(3, 0), 4: hm.Window(0, 12)},
    default=~hm.QueryFlag("flag") & hm.Window(5, 5),
)
MESH = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
COLLECTIVE = re.compile(
    r"^.* = (.*?) (all-reduce|(?:ragged-)?all-[gt][a-z-]+?|collective-[a-z]+|reduce-scatter)"
    r"(?:-start)?\(",
    re.MULTILINE,
)


def collectives(compiled):
    """What devices send each other: each operation, and the size of its largest result."""
    largest = {}
    for results, operation in COLLECTIVE.findall(compiled.as_text()):
        shapes = re.findall(r"\w+\[([\d,]*)\]", results)
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
        largest[operation] = max(largest.get(operation, 0), *sizes)
    return largest


def difference(one, other):
    """The largest between two structures of arrays, as a share of the largest entry of all."""
    one, other = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (one, other))
    apart = max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))
    return float(apart / max(np.abs(a).max() for a in one))


def operands():
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1, 20, (BATCH, LENGTH)).astype("int32")
    inputs = {"token_ids": token_ids, "flag": rng.random((BATCH, LENGTH)) < 0.2}
    return rng.normal(size=(BATCH, LENGTH, DIM)).astype("float32"), inputs


def distribution():
    """That of docs/beyond.md."""
    layout = keras.distribution.LayoutMap(MESH)
    layout[".*(query|key|value)/kernel"] = (None, "model", None)
    layout[".*(query|key|value)/bias"] = ("model", None)
    layout[".*attention_output/kernel"] = ("model", None, None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def by_batch(tree):
    """`tree` on the devices of the distribution in force, each example on its own."""
    layout = keras.distribution.distribution().get_data_layout
    return jax.tree.map(lambda x: jax.device_put(x, layout(x.shape).backend_layout), tree)


def tiny():
    """Three tiles of queries, and keys that are skipped."""
    return tuned(local_tile=LENGTH // 3, wide_tile=LENGTH // 3, block=LENGTH // 12)


def values(variables):
    return [variable.value for variable in variables]


# --- The layer -----------------------------------------------------------------------------------


def layer_of(rule, tiled):
    layer = hm.PerHeadMaskedMultiHeadAttention(
        HEADS, SIZE, mask_spec=rule, tiled=tiled, name="attention"
    )
    layer.build((None, LENGTH, DIM))
    return layer


def layer_call(layer):
    others = values(layer.non_trainable_variables)

    def call(weights, query, value, inputs):
        return layer.stateless_call(weights, others, query, value, mask_inputs=inputs)[0]

    return call


def squares(call):
    def loss(weights, *operands):
        outputs = call(weights, *operands)
        return (outputs**2).mean(), outputs

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def layer_facts(rule, tiled):
    x, inputs = operands()
    one = layer_of(rule, tiled)
    (_, outputs), gradients = jax.jit(squares(layer_call(one)))(
        values(one.trainable_variables), x, x, inputs
    )
    with distribution().scope():
        spread = layer_of(rule, tiled)
        spread.set_weights(one.get_weights())
        given = values(spread.trainable_variables), *by_batch((x, x, inputs))
        compiled = jax.jit(squares(layer_call(spread))).lower(*given).compile()
        (_, spread_outputs), spread_gradients = compiled(*given)
    kernel = spread.query_dense.kernel.value
    return {
        "outputs": difference(outputs, spread_outputs),
        "gradients": difference(gradients, spread_gradients),
        "sent": collectives(compiled),
        "heads of a device": [shard.data.shape[1] for shard in kernel.addressable_shards],
    }


def layer():
    return layer_facts(FAR, False)


def tiles():
    with tiny():
        return layer_facts(NEAR, True)


if __name__ == "__main__":
    print(json.dumps({"pairs": LENGTH**2, "facts": globals()[sys.argv[1]]()}))
