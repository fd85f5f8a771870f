"""One model, every route to it: each gives what NumPy loops give from its weights."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from contract import GROUPED, MULTI_HEAD, by_hand, numpy, random_biases
from oracle import mask as mask_by_loops
from tolerance import assert_close

import keras_headmask as hm

TOKENS = np.array([[5, 9, 4, 6, 9, 7, 0], [4, 4, 9, 9, 0, 0, 0]], "int32")  # 0 pads, 9 ends
PARTS = np.array([[0, 0, 1, 1, 2, 2, -1], [7, 7, 7, 0, -1, -1, -1]], "int32")
RULES = {
    "no rule": None,
    "per head": hm.PerHead({0: hm.SameSegment("parts"), "1-2": hm.Window(1, 2)}),
    "sentences in the graph": hm.PerHead({1: hm.SameSentence(9)}, default=hm.Chunk(3)),
    "not and or": ~hm.SameSegment("parts") | hm.KeyIn("token_ids", 9) & hm.Queries(2),
    "random blocks": hm.recipes.bigbird(block=2, density=0.3, global_blocks=1, seed=3),
    "a head off": hm.PerHead({3: hm.Nothing()}),
}
CALLS = {"plain": {}, "causal": {"use_causal_mask": True}, "dropout": {"dropout": 0.5}}
# Each rule and each call is compiled or written, not each pair of them: that takes its time.
PAIRED = [(MULTI_HEAD, rule, list(CALLS)[i % len(CALLS)]) for i, rule in enumerate(RULES)]
GROUPED_CASES = [(GROUPED, *case) for _, *case in PAIRED]
CASES = [(MULTI_HEAD, rule, call) for rule in RULES for call in CALLS] + GROUPED_CASES
PAIRED += GROUPED_CASES[1::3]
PER_HEAD_CALL = "causal"  # as that rule is paired


def name_of(case):
    return ", ".join(map(str, case))


def build(kind, rule, call):
    """Tokens -> embedding with an implicit mask -> one of our layers -> context and scores."""
    spec, call = RULES[rule], dict(CALLS[call])
    reads = {} if spec is None else spec.inputs
    inputs = {"token_ids": keras.Input((None,), dtype="int32", name="token_ids")}
    if "parts" in reads:
        inputs["parts"] = keras.Input((None,), dtype="int32", name="parts")
    x = keras.layers.Embedding(12, 8, mask_zero=True, name="embedding")(inputs["token_ids"])
    dropout = call.pop("dropout", 0.0)
    call["mask_inputs"] = {name: inputs[name] for name in reads} or None
    plain, scored = (
        kind.layer(4, 3, mask_spec=spec, dropout=dropout, name=name)
        for name in ("attention", "scored")
    )
    context = plain(x, **call)
    same, scores = scored(x, return_attention_scores=True, **call)
    random_biases(plain)
    scored.set_weights(plain.get_weights())
    return keras.Model(inputs, {"context": context, "same": same, "scores": scores})


def data(model):
    return {k: v for k, v in {"token_ids": TOKENS, "parts": PARTS}.items() if k in model.input}


def expected(model, kind, rule, call):
    layer = model.get_layer("attention")
    x = numpy(model.get_layer("embedding")(TOKENS))
    real = TOKENS != 0
    merged = real[:, None, None, :] & real[:, None, :, None]
    if RULES[rule] is not None:
        inputs = {"token_ids": (TOKENS, TOKENS), "parts": (PARTS, PARTS)}
        merged = merged & mask_by_loops(RULES[rule], 2, 4, 7, 7, inputs)
    if CALLS[call].get("use_causal_mask"):
        merged = merged & np.tri(7, dtype=bool)
    context, scores = by_hand(layer, x, mask=merged)
    return {"context": context, "same": context, "scores": scores}


def check(got, wanted, route):
    for name in wanted:
        assert_close(
            numpy(got[name]) if not isinstance(got[name], np.ndarray) else got[name],
            wanted[name],
            message=f"{route}: {name}",
            depth=2,
        )


@pytest.fixture(scope="module")
def models():
    keras.utils.set_random_seed(0)
    return {case: build(*case) for case in CASES}


@pytest.mark.parametrize("case", PAIRED, ids=name_of)
def test_eager_predict_and_clone(models, case):
    model = models[case]
    wanted = expected(model, *case)
    check(model(data(model)), wanted, "eager")
    check(model.predict(data(model), verbose=0), wanted, "predict")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.get_layer("attention").mask_spec == RULES[case[1]]
    check(clone(data(model)), wanted, "clone_model")


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("case", PAIRED, ids=name_of)
def test_tf_function(models, case, jit_compile):
    import tensorflow as tf

    model = models[case]
    check(
        tf.function(model, jit_compile=jit_compile)(data(model)), expected(model, *case), "function"
    )


FRESH = """
import sys, pathlib, numpy as np
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
if what == "keras":
    import keras, keras_headmask
else:
    import tensorflow as tf
for data in folder.glob("*.in.npz"):
    inputs, name = dict(np.load(data)), data.name.removesuffix(".in.npz")
    if what == "keras":
        out = keras.saving.load_model(folder / f"{name}.keras").predict(inputs, verbose=0)
    else:
        loaded = tf.saved_model.load(str(folder / name))
        out = loaded.serve({k: tf.constant(v) for k, v in inputs.items()})
    np.savez(folder / f"{name}.out.npz", **{k: np.asarray(v) for k, v in out.items()})
if what != "keras":
    assert "keras_headmask" not in sys.modules
"""


def run_fresh(folder, what):
    root = str(Path(__file__).parents[2])
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=root)
    command = [sys.executable, "-c", FRESH, str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long  # (`test_examples` and `test_subclassed` do it every day)
@pytest.mark.parametrize(
    "what", ["keras", pytest.param("saved_model", marks=pytest.mark.tensorflow)]
)
def test_saved_and_loaded_in_a_fresh_process(models, what, tmp_path):
    chosen = PAIRED[::2] if what == "keras" else PAIRED[1::4]  # an export takes seconds
    names = {case: f"model{i}" for i, case in enumerate(chosen)}
    for case, name in names.items():
        model = models[case]
        if what == "keras":
            model.save(tmp_path / f"{name}.keras")
        else:
            model.export(str(tmp_path / name), verbose=False)
        np.savez(tmp_path / f"{name}.in.npz", **data(model))
    run_fresh(tmp_path, what)
    for case, name in names.items():
        with np.load(tmp_path / f"{name}.out.npz") as out:
            check(dict(out), expected(models[case], *case), f"{what} {name_of(case)}")


def test_a_saved_rule_is_readable_json(models, kind, tmp_path):
    """The file holds the rule by its permanent kinds, not by class paths."""
    import json
    import zipfile

    path = Path(tmp_path / "model.keras")
    models[kind, "per head", PER_HEAD_CALL].save(path)
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    (layer,) = [x for x in config["config"]["layers"] if x["config"]["name"] == "attention"]
    assert layer["registered_name"] == f"keras_headmask>{kind.ours.__name__}"
    assert layer["config"]["mask_spec"] == {
        "kind": "per_head",
        "heads": {
            "0": {"kind": "same_segment", "input": "parts"},
            "1-2": {"kind": "window", "before": 1, "after": 2},
        },
        "default": {"kind": "full"},
    }


def test_cross_attention_with_pairs_of_mask_inputs_reloads(kind, tmp_path):
    """JSON makes a list of the pair."""
    q, v = keras.Input((None, 8), name="q"), keras.Input((None, 8), name="v")
    a = keras.Input((None,), dtype="int32", name="a")
    b = keras.Input((None,), dtype="int32", name="b")
    spec = hm.SameSegment("ids") | hm.KeyFlag("open") & hm.QueryFlag("wide")
    out = kind.layer(2, 4, mask_spec=spec)(
        q, v, mask_inputs={"ids": (a, b), "open": (None, b), "wide": (a, None)}
    )
    model = keras.Model([q, v, a, b], out)
    given = [np.ones((2, n, 8), "float32") * np.arange(n)[None, :, None] for n in (3, 5)]
    given += [PARTS[:, :3], PARTS[:, 1:6]]
    model.save(tmp_path / "pair.keras")
    reloaded = keras.saving.load_model(tmp_path / "pair.keras")
    np.testing.assert_array_equal(numpy(reloaded(given)), numpy(model(given)))
    x, y, a, b = given
    inputs = {"ids": (a, b), "open": (a, b), "wide": (a, b)}
    mask = mask_by_loops(spec, 2, 1, 3, 5, inputs)
    expected = by_hand(model.layers[-1], x, y, mask=mask)[0]
    assert_close(numpy(model(given)), expected, depth=3)


@pytest.mark.tensorflow
@pytest.mark.parametrize("with_scores", [False, True])
def test_rematerialised_layers_see_the_padding_again(kind, with_scores):
    """The recomputation has no Keras mask on its tensors: it must come as an argument."""

    def trained(remat):
        keras.utils.set_random_seed(5)
        with keras.RematScope(mode="full" if remat else None):
            tokens = keras.Input((7,), dtype="int32")
            x = keras.layers.Embedding(12, 8, mask_zero=True)(tokens)
            layer = kind.layer(2, 4)
            x = layer(x, return_attention_scores=True)[0] if with_scores else layer(x)
        # Without the mask that `fit` would weigh the loss by, which Keras loses here on its own.
        model = keras.Model(tokens, x[:, :4] * 1.0)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.fit(TOKENS, np.ones((2, 4, 8), "float32"), epochs=3, verbose=0)
        return model.get_weights()

    for plain, again in zip(trained(False), trained(True), strict=True):
        assert_close(again, plain)


@pytest.mark.every_day("Multi")
def test_training_learns_and_keeps_the_rule(models, kind):
    """`fit` runs the rule in the compiled step; the loss falls and the hidden keys stay hidden."""
    model = keras.models.clone_model(models[kind, "per head", PER_HEAD_CALL])
    target = {"context": np.ones((2, 7, 8), "float32")}
    trained = keras.Model(model.input, {"context": model.output["context"]})
    trained.compile("adam", "mse")
    losses = trained.fit(data(model), target, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    wanted = expected(model, kind, "per head", PER_HEAD_CALL)
    check(trained(data(model)), {"context": wanted["context"]}, "trained")
