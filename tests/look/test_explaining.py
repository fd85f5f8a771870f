"""`hm.explain` says what runs, and why nothing else does."""

import importlib
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from contract import numpy
from tiled_contract import attend, operands

import keras_headmask as hm
from keras_headmask.attention.kernels import KERNELS

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is no part of the package
kernels, cliff_cases = (
    importlib.import_module(f"benchmarks.{name}") for name in ("kernels", "cliff_cases")
)
BACKEND = keras.backend.backend()
RULE = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(3, 0)})
COMPILED = {"tensorflow": "XLA", "jax": "jax.jit", "torch": "torch.compile"}[BACKEND]
OF_COMPILED = {"tensorflow": "gathered", "jax": "loop", "torch": "FlexAttention"}[BACKEND]
OF_FEW = "loop" if BACKEND == "tensorflow" else "dense"  # pairs
CASES = [case for case in cliff_cases.grid() if case.step == "forward" and not case.dropout]


def said(found):
    return [(group.kernel, group.heads) for group in found.groups]


@pytest.mark.parametrize("case", CASES[::11], ids=str)
def test_it_names_what_runs(case):
    if (case.lengths == "unknown" and BACKEND != "tensorflow") or case.queries != case.keys:
        pytest.skip("lengths are known here, and queries counted from 0")
    with kernels._seen() as seen:
        if BACKEND == "tensorflow":
            importlib.import_module("benchmarks.cliffs")._function(
                case, "ours"
            ).get_concrete_function()
        else:
            given = map(keras.ops.convert_to_tensor, case.operands()[:3])
            hm.dot_product_attention(*given, None, case.spec(), case.data() or None)
    is_known = case.lengths == "known"
    sizes = {"queries": case.queries, "batch": case.batch} if is_known else {}
    found = hm.explain(case.spec(), **sizes, num_heads=case.heads, head_dim=case.size)
    if len(seen) == 1:  # of all heads together
        assert {name for name, _ in said(found)} == {seen[0][0]}
        assert sorted(head for _, heads in said(found) for head in heads) == list(seen[0][1])
    else:
        assert said(found) == seen


def test_a_layer_is_explained_as_it_is_called():
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8, mask_spec=RULE, dropout=0.5)
    found = hm.explain(layer, queries=300, training=True)
    assert found.name == layer.name
    assert not layer.built
    assert found.lengths == (300, 300)
    assert [group.heads for group in found.groups] == [(0,), (1,), (2, 3)]
    assert hm.explain(layer, queries=16).kernel == OF_FEW
    forced = hm.PerHeadMaskedMultiHeadAttention(4, 8, mask_spec=hm.Window(3, 0), tiled=True)
    found = hm.explain(forced, queries=256, batch=1, padding=True)
    assert found.kernel != "dense"
    assert found.groups[0].share < 1
    grouped = hm.PerHeadMaskedGroupedQueryAttention(8, 4, 2, mask_spec=RULE)
    assert len(hm.explain(grouped, queries=16, keys=24).groups) == 3


FUSED = "a fused kernel of Keras"
KERAS = FUSED if BACKEND == "torch" else "Keras' own attention"


def test_a_layer_without_a_rule_is_computed_by_keras():
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8)
    found = hm.explain(layer, queries=300)
    assert (
        str(found) == f"{layer.name}: {KERAS}\n  Nothing restricts it, so all logits are computed."
    )
    dropped = hm.PerHeadMaskedMultiHeadAttention(4, 8, dropout=0.5)
    assert hm.explain(dropped, queries=300, training=True).kernel == "dense"
    # Padding restricts it.
    found = hm.explain(layer, queries=300, padding=True)
    assert found.groups[-1].heads[-1] == 3


def test_code_of_a_class_is_named():
    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, *rest):
            return query, None

    x = keras.Input((16, 8))
    model = keras.Model(x, Own(2, 4, name="own")(x, x))
    assert str(hm.explain(model)) == (
        "own  code of its class\nNothing restricts it, so all logits are computed."
    )


def test_a_model_has_a_line_for_each_layer():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(9, 8)(ids)
    for name in ("first", "second", "third"):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 8, name=name)(y, y)])
    model = hm.apply_head_masks(keras.Model(ids, x), RULE, layers=("first", "third"))
    found = hm.explain(model, queries=300)
    assert [one.name for one in found] == ["first", "second", "third"]
    assert found[1].kernel == KERAS
    assert [len(one.groups) for one in found] == [3, 0, 3]
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["layers 0 and 2"] * 3 + ["1 second"]
    assert lines[0].split("  ")[-1].startswith("Head 0, ")
    assert lines[3].split() == ["1", "second", *KERAS.split()]
    assert lines[-1] == f"Compiled by {COMPILED}: {found[0].compiled}."
    # Nothing of the look stays.
    before = numpy(model(np.ones((1, 5), "int32")))
    hm.explain(model, queries=300)
    np.testing.assert_array_equal(numpy(model(np.ones((1, 5), "int32"))), before)


def test_nothing_of_a_look_stays_in_a_model():
    x = keras.Input((None, 8))
    y = keras.layers.BatchNormalization()(x)
    y = keras.layers.MultiHeadAttention(2, 4, dropout=0.5, seed=1, name="attention")(y, y)
    model = hm.apply_head_masks(keras.Model(x, y), hm.Window(3, 0))
    before = [numpy(v) for v in model.variables]
    assert hm.explain(model, queries=300, training=True)[0].name == "attention"
    for value, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(numpy(value), old)
    assert not model.losses


@pytest.mark.tensorflow
def test_a_function_inside_keeps_nothing_of_a_look():
    import tensorflow as tf

    class Inside(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(3, 0))
            self.run = tf.function(self.attention, [tf.TensorSpec((None, None, 8))])

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return self.run(x)

        def compute_output_shape(self, shape):
            return shape

    x = keras.Input((None, 8))
    layer = Inside()
    model = keras.Model(x, layer(x))
    hm.explain(model)
    given = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    np.testing.assert_allclose(model(given), layer.attention(given), rtol=1e-5, atol=1e-6)
    assert np.abs(model(given)).max() > 0


def test_a_step_stands_behind_its_keys():
    rule = hm.PerHead({0: hm.Window(31, 0)})
    found = hm.explain(rule, queries=256, keys=4096, query_offset=3840)
    assert found.groups[0].share < hm.explain(rule, queries=256, keys=256).groups[0].share
    ids = hm.SameSegment("ids") & hm.Window(31, 0)
    found = hm.explain(ids, queries=1, keys=4096, query_offset=4095, batch=1)
    assert (found.kernel, found.groups[0].share) == (OF_FEW, 1)


def test_no_advice_that_changes_nothing():
    forced = "`tiled=True` skips"
    assert forced in str(hm.explain(hm.Window(3, 0), queries=16, batch=1))
    assert forced not in str(hm.explain(hm.Full(), queries=16))
    with hm.dense_scope():
        assert forced not in str(hm.explain(hm.Window(3, 0), queries=512))


REFUSED = {  # arguments, and what is said of it
    "few": ({"queries": 16, "batch": 1}, r"there are fewer than 65536 pairs|All logits of a batch"),
    "asked": ({"queries": 512, "tiled": False}, r"not .*: `tiled=False` asks for all logits"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_all_logits_and_why(why):
    arguments, message = REFUSED[why]
    found = hm.explain(RULE, **arguments)
    assert found.kernel == (OF_FEW if why == "few" else "dense")
    assert np.array([group.share for group in found.groups]).min() == 1
    assert re.search(message, str(found))
    with hm.dense_scope():
        scoped = hm.explain(RULE, queries=512)
    assert (scoped.kernel, "`hm.dense_scope` holds" in str(scoped)) == ("dense", True)


def test_the_reason_is_the_error_of_tiled():
    qkv = operands(1, 9, 9, 2)
    with pytest.raises(ValueError, match="`tiled=True` is not possible here: returned prob"):
        attend(qkv, hm.Window(1, 1), tiled=True, return_scores=True)


@pytest.mark.tensorflow
def test_sizes_decide_between_all_logits_and_tiles():
    few, many, free = (
        hm.explain(hm.Window(31, 0), queries=length, batch=batch, num_heads=2)
        for length, batch in ((512, 1), (1024, 1), (None, None))
    )
    assert [x.kernel for x in (few, many, free)] == ["loop"] * 3
    assert few.groups[0].share == 1 > 0.3 > many.groups[0].share == free.groups[0].share
    assert "All logits of a batch of at most 524,288 logits, or 67,108,864" in str(few)
    assert free.lengths == (1024, 1024)
    assert "The sizes decide when the graph runs: of a batch of at most 524,288" in str(free)
    assert "logits" not in str(many).partition("\n")[2].replace(
        "`tiled=False` computes all logits", ""
    )
    short = hm.explain(hm.Window(31, 0), queries=256, batch=64, num_heads=2)  # two tiles each
    assert short.groups[0].share == 1
    all_heads = hm.explain(RULE, queries=512, batch=4, num_heads=4)  # some head is not local
    assert "of at most 8,388,608 logits" in str(all_heads)
    any_batch = hm.explain(hm.Window(31, 0), queries=256, batch=None, num_heads=2)
    assert any_batch.groups[0].share == 1
    assert "of sequences of at most 131,072 pairs, any number of them," in str(any_batch)


@pytest.mark.tensorflow
@pytest.mark.parametrize("are_local", [True, False])
def test_a_graph_decides_by_sizes_as_python_does(are_local):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow.by_size import Limits

    limits = Limits(2**19 if are_local else 2**23, 2**26, 2**17)
    cases = {
        (8, 16, 16): True,
        (8, 128, 128): True,  # many logits, but a tile is a whole sequence
        (4096, 200, 200): False,  # a batch that would take gigabytes
        (1, 362, 362): True,
        (1, 512, 512): not are_local,
        (1, 1, 4096): True,
        (1, 65536, 65536): False,  # more than 32 bits
    }
    for sizes, expected in cases.items():
        assert limits.hold(8, *sizes) is expected
        of_tensors = limits.hold(8, *map(tf.constant, sizes))
        assert bool(of_tensors) == expected
    assert limits._replace(logits=0).hold(8, 1, 1, 1) is False
    for length, expected in ((16, True), (362, True), (512, None)):  # of any batch
        assert limits.hold_of(8, None, length, length) is expected
        if expected:
            assert limits.hold(8, tf.constant(4096), length, length) is True
    assert limits.hold_of(8, 1, None, 16) is None


def test_what_compiled_code_runs():
    """XLA, `jax.jit`, and `torch.compile` for inference."""
    found = hm.explain(hm.Window(31, 0), queries=1024, batch=1, num_heads=2)
    assert found.kernel == {"torch": "SDPA"}.get(BACKEND, "loop")
    assert found.compiled == OF_COMPILED
    assert str(found).splitlines()[-1] == f"  Compiled by {COMPILED}: {OF_COMPILED}."
    assert hm.explain(hm.Window(31, 0), queries=16, batch=1).compiled == "dense"
    two = hm.PerHead({0: hm.Window(31, 0), 1: hm.Window(15, 0)}, default=hm.Window(7, 0))
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8, mask_spec=two)
    assert hm.explain(layer, queries=1024).compiled == OF_COMPILED
    if BACKEND == "torch":
        import torch

        assert not torch.compiler.is_compiling()


@pytest.mark.tensorflow
def test_xla_needs_lengths():
    assert hm.explain(hm.Window(31, 0)).compiled == "dense"
    found = hm.explain(hm.Window(31, 0), tiled=True)
    assert found.compiled.startswith("an error, `tiled=True` is not possible here: outside Tens")


def test_a_step_of_generate():
    keras_hub = pytest.importorskip("keras_hub")
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = keras_hub.models.GPT2Backbone(vocabulary_size=9, max_sequence_length=32, **sizes)
    task = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    masked = hm.apply_head_masks(task, hm.PerHead({0: hm.Window(3, 0)}))
    said = str(hm.explain(masked, queries=16, batch=1)).splitlines()
    assert said[-1] == "A step of `generate()`: one query against KerasHub's cache of all keys."
    assert hm.explain(task, queries=16)[0].step.endswith("KerasHub's cache of all keys")
    assert hm.explain(hm.apply_head_masks(backbone, hm.Window(3, 0)), queries=16)[0].step == ""


def test_what_cannot_be_explained():
    with pytest.raises(TypeError, match=r"must be a rule, an attention layer .* its model"):
        hm.explain(keras.layers.MultiHeadAttention(2, 4), queries=4)
    with pytest.raises(ValueError, match=r"`queries`.*at least 1"):
        hm.explain(RULE, queries=0)
    with pytest.raises(ValueError, match="needs the inputs of a model"):
        hm.explain(keras.Sequential([keras.layers.Dense(2)]), queries=4)
    with pytest.raises(ValueError, match="`head_dim`"):
        hm.explain(RULE, queries=4, head_dim=0)
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8, mask_spec=RULE)
    with pytest.raises(TypeError, match="A layer has no 'tiled' of its own to set here"):
        hm.explain(layer, queries=4, tiled=True)
    with pytest.raises(TypeError, match="A rule has no 'padding'"):
        hm.explain(RULE, queries=4, padding=True)
    if BACKEND != "tensorflow":
        with pytest.raises(ValueError, match="pass `queries=`"):
            hm.explain(RULE)
        x = keras.Input((16, 8))
        known = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
        assert hm.explain(hm.apply_head_masks(known, hm.Window(1, 1)))


@pytest.fixture
def in_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("in_bfloat16")
def test_it_explains_a_gpu_that_is_not_at_hand():
    """Nothing is computed there, and what runs after it is for this machine again."""
    sizes = {"queries": 2048, "batch": 1, "num_heads": 4}
    near, padded = hm.Window(99, 99), hm.KeyFlag("flags")
    of_window = {"tensorflow": "loop", "jax": "gathered", "torch": "FlexAttention on CUDA"}
    of_padding = {"tensorflow": "loop", "jax": "cuDNN", "torch": "SDPA with the mask"}
    at_hand = hm.explain(near, **sizes)
    assert hm.explain(near, device="gpu", **sizes).kernel == of_window[BACKEND]
    assert hm.explain(padded, device="gpu", **sizes).kernel == of_padding[BACKEND]
    assert hm.explain(near, **sizes) == hm.explain(near, device="cpu", **sizes) == at_hand
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 64, mask_spec=padded)
    made = hm.explain(layer, queries=2048, batch=1, device="gpu")
    assert made.kernel == of_padding[BACKEND]
    assert "oneDNN" not in str(made)


def test_a_device_that_it_does_not_know():
    with pytest.raises(ValueError, match="`device` must be"):
        hm.explain(RULE, queries=4, device="cuda")


def test_every_kernel_has_a_name_of_its_own_on_its_backend():
    for of_device in (kernels for x in KERNELS.values() for kernels in x.values()):
        names = [one.name for x in of_device for one in getattr(x, "kernels", (x,))]
        assert len(names) == len(set(names))
        assert names[-1] == "dense"
