"""A program on JAX with eight virtual devices: prints what the test named by its argument asks for.

It is started by `test_devices.py`, which asserts. Facts are one JSON object on the last line.
"""

import json
import math
import re
import sys
import tempfile
from unittest import mock

import jax
import keras
import numpy as np
import oracle
from jax.sharding import NamedSharding, PartitionSpec

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


def distribution(model):
    layout = hm.head_layout(model, MESH)
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
    with distribution(one).scope():
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
    with distribution(one).scope():
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
    with distribution(one).scope(), planted:
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


# --- A backbone of KerasHub ----------------------------------------------------------------------


def backbone():
    import keras_hub

    stock = keras_hub.models.BertBackbone(
        vocabulary_size=20,
        num_layers=2,
        num_heads=HEADS,
        hidden_dim=DIM,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    padding = np.arange(LENGTH) < np.array([[LENGTH], [50], [LENGTH], [70]])
    data = ids() | {"segment_ids": np.zeros((BATCH, LENGTH), "int32"), "padding_mask": padding}
    targets = floats(BATCH, 2)

    def trainable():
        masked = hm.apply_head_masks(stock, FAR, add_inputs=True)
        head = keras.layers.Dense(2, name="head", kernel_initializer="ones")
        model = keras.Model(masked.input, head(masked.output["pooled_output"]))
        model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse", jit_compile=True)
        return model

    def fit(model):
        return model.fit(data, targets, batch_size=BATCH, epochs=20, verbose=0).history["loss"]

    def gradients_of(model, data):
        """Those of the weights of the blocks, and the program that makes them."""
        weights = values(model.trainable_variables)
        rest = values(model.non_trainable_variables)

        def loss(weights, data):
            return (model.stateless_call(weights, rest, data)[0] ** 2).mean()

        compiled = jax.jit(jax.grad(loss)).lower(weights, data).compile()
        pairs = zip(model.trainable_variables, compiled(weights, data), strict=True)
        return [x for v, x in pairs if v.path.startswith("transformer_layer")], compiled

    one = trainable()
    gradients, _ = gradients_of(one, data)
    outputs, losses = one.predict(data, verbose=0), fit(one)
    with distribution(stock).scope():
        model = trainable()
        spread_gradients, compiled = gradients_of(model, by_batch(data))
        facts = {
            "outputs": difference(outputs, model.predict(data, verbose=0)),
            "gradients": difference(gradients, spread_gradients),
            "losses": difference(losses, fit(model)),
            "weights": difference(one.get_weights(), model.get_weights()),
            "learned": losses[0] - losses[-1],
            "sent": collectives(compiled),
        }
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.saving.load_model(f"{folder}/model.keras")
    return facts | {"share": share(model), "share if loaded": share(loaded)}


def share(model):
    """Which part of each weight the first device holds."""
    return {
        variable.path: variable.value.addressable_shards[0].data.size / variable.value.size
        for variable in model.trainable_variables
    }


# --- Queries over devices ------------------------------------------------------------------------


def queries():
    """Queries of a window over four devices with whole keys, by a constraint and by hand."""
    rule, heads, size = hm.PerHead({0: hm.Window(9, 0)}, default=hm.Window(3, 3)), 2, 4
    operands = [floats(BATCH, LENGTH, heads, size) * scale for scale in (1, 2, 3)]
    mesh = MESH.backend_mesh
    part, whole = PartitionSpec("batch", "model"), PartitionSpec("batch")
    by_query = [NamedSharding(mesh, spec) for spec in (part, whole, whole)]

    def constrained(query, key, value):
        query = jax.lax.with_sharding_constraint(query, by_query[0])
        context = hm.dot_product_attention(query, key, value, mask_spec=rule, tiled=False)
        return jax.lax.with_sharding_constraint(context, by_query[0])

    def on_one(query, key, value):  # device: its own queries, all keys
        own = query.shape[1]

        def at(first):
            def attend(query, key, value):
                given = {"mask_spec": rule, "query_offset": first, "tiled": True}
                return hm.dot_product_attention(query, key, value, **given)

            return attend

        branches = [at(first) for first in range(0, key.shape[1], own)]
        return jax.lax.switch(jax.lax.axis_index("model"), branches, query, key, value)

    # With `check_vma`, JAX would sum gradients inside the branches, of which each device runs one.
    specs = {"in_specs": (part, whole, whole), "out_specs": part, "check_vma": False}
    by_hand = jax.shard_map(on_one, mesh=mesh, **specs)

    def loss(attend):
        def of(*operands):
            context = attend(*operands)
            return (context**2).sum(), context

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True))

    usual = loss(lambda q, k, v: hm.dot_product_attention(q, k, v, mask_spec=rule))(*operands)
    placed = [jax.device_put(x, where) for x, where in zip(operands, by_query, strict=True)]
    facts = {}
    with tiny(LENGTH):
        for name, attend in (("constrained", constrained), ("by hand", by_hand)):
            compiled = loss(attend).lower(*placed).compile()
            (_, context), gradients = compiled(*placed)
            facts[name] = {
                "outputs": difference(usual[0][1], context),
                "gradients": difference(usual[1], gradients),
                "sent": collectives(compiled),
                "queries of a device": context.addressable_shards[0].data.shape[1],
            }
    return facts


if __name__ == "__main__":
    print(json.dumps({"pairs": LENGTH**2, "facts": globals()[sys.argv[1]]()}))
