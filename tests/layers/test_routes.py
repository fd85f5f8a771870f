"""One model, every route to it: each gives what NumPy loops give from its weights."""

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
    "blocks": hm.Chunk(2, before=1, after=1) | hm.Queries(0, 2) | hm.Keys(0, 2),
    "a head off": hm.PerHead({3: hm.Nothing()}),
}
CALLS = {"plain": {}, "causal": {"use_causal_mask": True}, "dropout": {"dropout": 0.5}}
# Each rule and each call is compiled, not each pair of them: that takes its time.
CASES = [(MULTI_HEAD, rule, list(CALLS)[i % len(CALLS)]) for i, rule in enumerate(RULES)]
CASES += [(GROUPED, *case) for _, *case in CASES[1::3]]


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_every_route_gives_what_the_loops_give(case):
    model = build(*case)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.get_layer("attention").mask_spec == RULES[case[1]]
    routes = {
        "eager": model,
        "predict": lambda given: model.predict(given, verbose=0),
        "clone_model": clone,
    }
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        routes |= {"graph": tf.function(model), "XLA": tf.function(model, jit_compile=True)}
    wanted = expected(model, *case)
    for route, call in routes.items():
        got = call(data(model))
        for name, one in wanted.items():
            assert_close(got[name], one, message=f"{route}: {name}", depth=2)


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
