"""Heads, or queries, over several devices, on JAX: the same answers, and little is sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow  # the programs choose their backend
HERE = Path(__file__).parent
PATHS = HERE.parents[1], HERE.parent / "support"
MESH = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), [f"cpu:{i}" for i in range(8)])


def on_eight_devices(name):
    """What `name` of `on_devices.py` finds, in a process with eight virtual devices."""
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    run = subprocess.run(
        [sys.executable, HERE / "on_devices.py", name],
        env=os.environ
        | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    return said["pairs"], said["facts"]


@pytest.mark.parametrize("name", [pytest.param("layer", marks=pytest.mark.long), "tiles"])
def test_heads_on_devices(name):
    pairs, facts = on_eight_devices(name)
    spread = facts["spread"]
    assert spread["outputs"] < 1e-5
    assert spread["gradients"] < 1e-5
    assert spread["heads of a device"] == [2] * 8
    # One sum over devices joins the heads, and gradients are summed; nothing else is sent.
    assert set(spread["sent"]) == {"all-reduce"}
    assert spread["sent"]["all-reduce"] < pairs
    # (That more would be seen: where heads are cut and joined, as on one device, masks are sent.)
    assert set(facts["sent if cut"]) - {"all-reduce"}
    # Each head sees what its rule allows, on whichever device it lives, and no more.
    assert facts["seen"]["wrong of head"] == [0] * 8
    assert 0.05 < facts["seen"]["share"] < 0.95


@pytest.mark.long
def test_a_masked_backbone_trains_on_devices():
    pytest.importorskip("keras_hub")
    pairs, facts = on_eight_devices("backbone")
    assert facts["outputs"] < 1e-5
    assert facts["gradients"] < 1e-5
    assert facts["losses"] < 1e-5 < facts["learned"]
    assert facts["weights"] < 1e-5
    assert set(facts["sent"]) == {"all-reduce"}
    assert facts["sent"]["all-reduce"] < pairs
    quarter = {path for path, share in facts["share"].items() if share == 1 / 4}
    in_blocks = {path for path in facts["share"] if re.match("transformer_layer_[01]/", path)}
    whole = re.compile("norm|(attention_output|output_dense)/bias")
    assert quarter == {path for path in in_blocks if not whole.search(path)}
    assert len(quarter) == 2 * 10
    assert facts["share if loaded"] == facts["share"]


@pytest.mark.long
def test_queries_on_devices_with_whole_keys():
    pairs, facts = on_eight_devices("queries")
    for found in facts.values():
        assert found["outputs"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["queries of a device"] == 24
        assert max(found["sent"].values(), default=0) < pairs


# --- The layout ----------------------------------------------------------------------------------


def model_of(**heads):
    x = outputs = keras.Input((None, 8))
    for name, number in heads.items():
        attention = hm.PerHeadMaskedMultiHeadAttention(number, 2, name=name)
        outputs = attention(outputs)
    return keras.Model(x, outputs)


def axes_of(layout):
    return {path: layout.axes for path, layout in layout.items()}


def test_the_layout_of_gates_biases_and_feed_forward():
    x = keras.Input((None, 8))
    gated = keras.layers.MultiHeadAttention(4, 2, name="a", use_gate=True, use_bias=False)
    y = keras.layers.Dense(8, name="out")(keras.layers.Dense(16, name="in")(gated(x, x)))
    y = keras.layers.Dense(2, name="last")(keras.layers.Dense(6, name="odd")(y))
    model = keras.Model(x, y)
    found = axes_of(hm.head_layout(model, MESH))
    kernels = {v.path for v in model.variables if v.path.startswith("a/")}
    of_heads = dict.fromkeys(kernels, (None, "model", None))
    of_heads["a/attention_output/kernel"] = ("model", None, None)
    assert len(kernels) == 5
    assert found == of_heads | {
        "in/kernel": (None, "model"),
        "in/bias": ("model",),
        "out/kernel": ("model", None),
    }


def test_a_path_is_taken_literally():
    layout = hm.head_layout(model_of(**{"a.b": 4}), MESH)
    assert layout["a.b/query/kernel"].axes == (None, "model", None)
    assert layout["axb/query/kernel"] is None


def test_two_towers_whose_layers_have_the_same_names():
    x = keras.Input((None, 8))
    left, right = model_of(a=4), model_of(a=8)
    both = keras.Model(x, keras.layers.Add()([left(x), right(x)]))
    assert axes_of(hm.head_layout(both, MESH)) == axes_of(hm.head_layout(left, MESH))


def test_a_path_of_weights_on_different_axes():
    def tower(wide):
        x = keras.Input((None, 8))
        y = keras.layers.MultiHeadAttention(4, 2, name="a")(x, x)
        first, second = ("in", "out") if wide else ("out", "in")
        y = keras.layers.Dense(8, name=second)(keras.layers.Dense(16, name=first)(y))
        return keras.Model(x, y)

    x = keras.Input((None, 8))
    both = keras.Model(x, keras.layers.Add()([tower(True)(x), tower(False)(x)]), name="both")
    said = "Two weights of 'both' have the path '(in|out)/kernel', .* give these layers other names"
    with pytest.raises(ValueError, match=said):
        hm.head_layout(both, MESH)


def test_a_mesh_that_does_not_divide_the_heads():
    said = (
        "axis 'model' of the mesh has 4 devices, which do not divide the 6 heads of the attention "
        r"layer 'narrow'. Make a mesh with one of these numbers of devices along 'model': \[1, 2\]."
    )
    with pytest.raises(ValueError, match=said):
        hm.head_layout(model_of(wide=4, narrow=6), MESH)


def test_what_is_no_model_mesh_axis_or_attention():
    model = model_of(a=4)
    with pytest.raises(TypeError, match=r"`model` must be a Keras model or layer\. Received: 3"):
        hm.head_layout(3, MESH)
    with pytest.raises(TypeError, match=r"must be a mesh.*Received: \(2, 4\)"):
        hm.head_layout(model, (2, 4))
    with pytest.raises(ValueError, match=r"no axis 'heads'. It has: \['batch', 'model'\]"):
        hm.head_layout(model, MESH, axis="heads")
    with pytest.raises(ValueError, match=r"'plain' holds no `keras\.layers\.MultiH"):
        hm.head_layout(keras.Sequential([keras.Input((2,))], name="plain"), MESH)
    with pytest.raises(ValueError, match=r"attention layers \['new'\] of 'new' are not built"):
        hm.head_layout(keras.layers.MultiHeadAttention(4, 2, name="new"), MESH)


def test_a_copy_has_the_paths_that_a_layout_names():
    model = model_of(first=4, second=8)
    layout = axes_of(hm.head_layout(model, MESH))
    masked = hm.apply_head_masks(model, hm.Window(2, 2))
    for copy in (masked, keras.models.clone_model(masked)):
        assert axes_of(hm.head_layout(copy, MESH)) == layout
