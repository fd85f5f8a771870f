"""Exports of lengths that are symbols, on JAX: such a length can be compared with nothing."""

import keras
import numpy as np
import pytest
from tolerance import assert_close

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("lengths are symbols on JAX alone", allow_module_level=True)

import jax
from jax import export

HEADS, SIZE = 4, 3
RULES = {
    "no rule": None,
    "streaming": hm.recipes.streaming(sinks=2, window=4),
    "per head": hm.PerHead({0: hm.Window(8, 8, step=4), "1-2": ~hm.Window(4, 4), 3: hm.Chunk(5)}),
    "documents": hm.SameSegment("ids") & hm.Window(after=0),
    "sentences": hm.SameSentence(1, "ids"),
    "longformer": hm.recipes.longformer(2, "flags"),
    "ids per head": hm.PerHead({0: hm.KeyIn("ids", 1) | hm.QueryIn("ids", 2)}, hm.Nothing()),
    "a whole mask": hm.MaskInput("whole"),
}


def reads(rule):
    return () if rule is None else rule.inputs


def data(batch, length, names, seed=0):
    rng = np.random.default_rng(seed)
    made = {
        "x": rng.normal(size=(batch, length, HEADS, SIZE)).astype("float32"),
        "ids": rng.integers(0, 3, (batch, length)).astype("int32"),
        "flags": rng.random((batch, length)) < 0.5,
        "whole": rng.random((batch, length, length)) < 0.5,
    }
    return {name: made[name] for name in names}


def symbols(names, scope):
    """What `data` gives, its batch and length unknown, as shapes for a trace."""

    def of(name):
        shape = {"x": f"b, t, {HEADS}, {SIZE}", "whole": "b, t, t"}.get(name, "b, t")
        dtype = {"x": "float32", "ids": "int32"}.get(name, "bool")
        return jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)

    return {name: of(name) for name in names}


@pytest.mark.parametrize("name", RULES)
def test_masks_and_attention_under_any_rule(name):
    rule = RULES[name]

    def run(given):
        x, length = given["x"], given["x"].shape[1]
        inputs = {name: given[name] for name in reads(rule)} or None
        context = hm.dot_product_attention(x, x + 1, x**2, mask_spec=rule, mask_inputs=inputs)
        if rule is None:
            return context, None
        return context, hm.make_mask(rule, length, length, HEADS, inputs)

    names = ["x", *reads(rule)]
    exported = export.export(jax.jit(run))(symbols(names, export.SymbolicScope()))
    for batch, length in ((2, 7), (1, 260)):  # of 260, tiles where lengths are known
        given = data(batch, length, names)
        (got, mask), (wanted, known_mask) = exported.call(given), jax.jit(run)(given)
        assert_close(got, wanted, depth=3)
        if rule is not None:
            np.testing.assert_array_equal(mask, known_mask)


def test_a_saved_model_by_keras(tmp_path):
    """A layer of one head by sentence and one by a window."""
    tf = pytest.importorskip("tensorflow")
    x, ids = keras.Input((None, 8), name="x"), keras.Input((None,), dtype="int32", name="ids")
    rule = hm.PerHead({0: hm.SameSegment("ids")}, hm.Window(2, 2))
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=rule)
    model = keras.Model([x, ids], layer(x, mask_inputs={"ids": ids}))
    options = {"format": "tf_saved_model", "verbose": False}
    # Keras gives each unknown size a name of its own.
    with pytest.raises(ValueError, match=r"length b where.* a keys.*polymorphic_shapes"):
        model.export(tmp_path / "apart", **options)
    names = {"polymorphic_shapes": [["(b, t, 8)", "(b, t)"]]}
    model.export(tmp_path / "model", jax2tf_kwargs=names, **options)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    rng = np.random.default_rng(0)
    for length in (5, 33):
        ids = rng.integers(0, 3, (2, length)).astype("int32")
        given = [rng.normal(size=(2, length, 8)).astype("float32"), ids]
        assert_close(loaded.serve(given).numpy(), model(given), depth=3)
