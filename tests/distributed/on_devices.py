"""A program on JAX with eight virtual devices: prints what the test named by its argument asks for.

It is started by `test_devices.py`, which asserts. Facts are one JSON object on the last line.
"""

import json
import math
import re
import sys
from unittest import mock

import jax
import keras
import numpy as np
import oracle

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned
from keras_headmask.rules import evaluation

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


def ids(length=LENGTH):
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1, 20, (BATCH, length)).astype("int32")
    return {"token_ids": token_ids, "flag": rng.random((BATCH, length)) < 0.2}


def floats(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def distribution():
    """That of docs/devices.md."""
    layout = keras.distribution.LayoutMap(MESH)
    layout[".*(query|key|value)/kernel"] = (None, "model", None)
    layout[".*(query|key|value)/bias"] = ("model", None)
    layout[".*attention_output/kernel"] = ("model", None, None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def by_batch(tree):
    """`tree` on the devices of the distribution in force, each example on its own."""
    layout = keras.distribution.distribution().get_data_layout
    return jax.tree.map(lambda x: jax.device_put(x, layout(x.shape).backend_layout), tree)


def tiny(length):
    """Three tiles of queries, and keys that are skipped."""
    return tuned(local_tile=length // 3, wide_tile=length // 3, block=length // 12)


def values(variables):
    return [variable.value for variable in variables]


# --- The layer -----------------------------------------------------------------------------------


def layer_of(rule, tiled, length):
    """Its output holds the context of each head by itself: the last projection changes nothing."""
    layer = hm.PerHeadMaskedMultiHeadAttention(
        HEADS, SIZE, mask_spec=rule, tiled=tiled, output_shape=HEADS * SIZE, name="attention"
    )
    layer.build((None, length, DIM))
    kernel = np.eye(HEADS * SIZE, dtype="float32").reshape(HEADS, SIZE, -1)
    layer.output_dense.kernel.assign(kernel)
    return layer


def twin_of(layer, length):
    twin = layer_of(layer.mask_spec, layer.get_config().get("tiled"), length)
    twin.set_weights(layer.get_weights())
    return twin


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
    x, inputs = floats(BATCH, LENGTH, DIM), ids()
    one = layer_of(rule, tiled, LENGTH)
    (_, outputs), gradients = jax.jit(squares(layer_call(one)))(
        values(one.trainable_variables), x, x, inputs
    )
    with distribution().scope():
        spread = twin_of(one, LENGTH)
        weights = values(spread.trainable_variables)
        operands = by_batch((x, x, inputs))
        compiled = jax.jit(squares(layer_call(spread))).lower(weights, *operands).compile()
        (_, spread_outputs), spread_gradients = compiled(weights, *operands)
    kernel = spread.query_dense.kernel.value
    return {
        "outputs": difference(outputs, spread_outputs),
        "gradients": difference(gradients, spread_gradients),
        "sent": collectives(compiled),
        "heads of a device": [shard.data.shape[1] for shard in kernel.addressable_shards],
    }


def perturbed(rule, tiled, length=24):
    """Whether each head, on its device, sees the keys that its rule allows, and no other."""
    one = layer_of(rule, tiled, length)
    x, inputs = floats(BATCH, length, DIM), ids(length)
    with distribution().scope():
        spread = twin_of(one, length)
        weights, call = values(spread.trainable_variables), jax.jit(layer_call(spread))

        def context(value):
            outputs = np.asarray(call(weights, *by_batch((x, value, inputs))))
            return outputs.reshape(BATCH, length, HEADS, SIZE)

        before, seen = context(x), []
        for key in range(length):
            moved = np.zeros(before.shape[:3], bool)
            for step in (1, -1):  # one of them may leave a pair too small a probability
                changed = x.copy()
                changed[:, key] += step
                moved |= (context(changed) != before).any(-1)
            seen.append(moved)
    given = {name: inputs[name] for name in rule.inputs}
    expected = oracle.mask(rule, BATCH, HEADS, length, length, given)
    wrong = np.stack(seen, axis=-1).transpose(0, 2, 1, 3) != expected
    return {"wrong of head": wrong.sum((0, 2, 3)).tolist(), "share": float(expected.mean())}


def sent_if_cut(rule, tiled):
    """What devices send each other where heads are cut and joined, as on one device."""
    one = layer_of(rule, tiled, LENGTH)
    x = floats(BATCH, LENGTH, DIM)
    planted = mock.patch.object(evaluation, "heads_are_spread", return_value=False)
    with distribution().scope(), planted:
        spread = twin_of(one, LENGTH)
        given = values(spread.trainable_variables), *by_batch((x, x, ids()))
        return collectives(jax.jit(layer_call(spread)).lower(*given).compile())


def layer():
    facts = {"spread": layer_facts(FAR, False), "seen": perturbed(FAR, False)}
    return facts | {"sent if cut": sent_if_cut(FAR, False)}


def tiles():
    with tiny(24):
        seen = perturbed(NEAR, True)
    with tiny(LENGTH):
        facts = {"spread": layer_facts(NEAR, True), "sent if cut": sent_if_cut(NEAR, True)}
    return facts | {"seen": seen}


if __name__ == "__main__":
    print(json.dumps({"pairs": LENGTH**2, "facts": globals()[sys.argv[1]]()}))
