"""The layer on eight virtual devices of JAX and on one; `test_workers.py` runs it.

Answers and gradients are equal, each device holds its heads, and little is sent.
"""

import math
import re

import jax
import keras
import numpy as np

import keras_headmask as hm
from keras_headmask.attention.scopes import tuned

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
COLLECTIVE = re.compile(
    r"^.* = (.*?) (all-reduce|(?:ragged-)?all-[gt][a-z-]+?|collective-[a-z]+|reduce-scatter)"
    r"(?:-start)?\(",
    re.MULTILINE,
)


def sent(compiled):
    """What devices send each other: each operation, and the size of its largest result."""
    largest = {}
    for results, operation in COLLECTIVE.findall(compiled.as_text()):
        shapes = re.findall(r"\w+\[([\d,]*)\]", results)
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
        largest[operation] = max(largest.get(operation, 0), *sizes)
    return largest


def assert_equal(one, other):
    """Of two structures of arrays; the unit is the largest entry of all."""
    one, other = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (one, other))
    apart = max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))
    assert apart / max(np.abs(a).max() for a in one) < 1e-5


def distribution():
    """That of docs/beyond.md."""
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*(query|key|value)/kernel"] = (None, "model", None)
    layout[".*(query|key|value)/bias"] = ("model", None)
    layout[".*attention_output/kernel"] = ("model", None, None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def layer_of(rule, tiled):
    layer = hm.PerHeadMaskedMultiHeadAttention(
        HEADS, SIZE, mask_spec=rule, tiled=tiled, name="attention"
    )
    layer.build((None, LENGTH, DIM))
    return layer, [variable.value for variable in layer.trainable_variables]


def outputs_and_gradients(layer):
    others = [variable.value for variable in layer.non_trainable_variables]

    def loss(weights, query, value, inputs):
        outputs = layer.stateless_call(weights, others, query, value, mask_inputs=inputs)[0]
        return (outputs**2).mean(), outputs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def check(rule, tiled):
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1, 20, (BATCH, LENGTH)).astype("int32")
    inputs = {"token_ids": token_ids, "flag": rng.random((BATCH, LENGTH)) < 0.2}
    x = rng.normal(size=(BATCH, LENGTH, DIM)).astype("float32")
    one, weights = layer_of(rule, tiled)
    expected = outputs_and_gradients(one)(weights, x, x, inputs)
    with distribution().scope():
        spread, _ = layer_of(rule, tiled)
        spread.set_weights(one.get_weights())
        layout = keras.distribution.distribution().get_data_layout
        operands = jax.tree.map(  # each example on its own
            lambda x: jax.device_put(x, layout(x.shape).backend_layout), (x, x, inputs)
        )
        weights = [variable.value for variable in spread.trainable_variables]
        compiled = outputs_and_gradients(spread).lower(weights, *operands).compile()
        (_, outputs), gradients = compiled(weights, *operands)
    assert_equal(outputs, expected[0][1])
    assert_equal(gradients, expected[1])
    shards = spread.query_dense.kernel.value.addressable_shards
    assert [shard.data.shape[1] for shard in shards] == [2] * 8
    # One sum over devices joins the heads, and gradients are summed; nothing else is sent.
    assert sent(compiled).keys() == {"all-reduce"}
    assert sent(compiled)["all-reduce"] < LENGTH**2


if __name__ == "__main__":
    check(FAR, tiled=False)
    with tuned(local_tile=LENGTH // 3, wide_tile=LENGTH // 3, block=LENGTH // 12):
        check(NEAR, tiled=True)  # three tiles of queries, and keys that are skipped
