"""A masked model obeys whenever it is called; what is built from layers inside it is refused."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from small_models import CHUNK, TOKENS, Block, apply, leak, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.adapters import attention

BACKEND = keras.backend.backend()
BY_IDS = hm.SameSentence(9)
CHANGED = TOKENS.copy()
CHANGED[:, 5] = 11  # of another chunk, and of another sentence, than the first two

registered = keras.saving.register_keras_serializable("test_frame")


# --- Kinds of models ------------------------------------------------------------------------------


def token_ids():
    return keras.Input((7,), dtype="int32", name="token_ids")


def nested():
    inner, x = stack(1), token_ids()
    return keras.Model(x, Block(name="last")(inner(x)))


def sequential():
    return keras.Sequential([token_ids(), layers.Embedding(12, 8), Block(name="block")])


def shared():
    """As ALBERT: one block, again on what it gave."""
    block, x = Block(name="shared"), token_ids()
    return keras.Model(x, block(block(layers.Embedding(12, 8)(x))))


def of_a_dict():
    x = token_ids()
    return keras.Model({"token_ids": x}, {"out": stack(1)(x)})


@registered
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(12, 8)
        self.block = Block(layers.MultiHeadAttention(4, 3, name="self"), name="block")

    def call(self, token_ids):
        return self.block(self.embedding(token_ids))


def subclassed():
    model = Subclassed()
    model(TOKENS)
    return model


KINDS = {
    "one layer": functools.partial(one_layer, mask_zero=False),
    "composites": stack,
    "nested": nested,
    "sequential": sequential,
    "shared": shared,
    "a dict": of_a_dict,
    "subclassed": subclassed,
}


def masked_of(kind, rule):
    """The stock model, and the masked one. (Without a graph a name alone says what is self-.)"""
    stock = KINDS[kind]()
    return stock, hm.apply_head_masks(
        stock, rule, "self" if kind == "subclassed" else None, ignore=""
    )


def graph_of(model):
    return model._functional if isinstance(model, keras.Sequential) else model


def given_to(model, tokens=TOKENS):
    return {"token_ids": tokens} if isinstance(getattr(model, "input", 0), dict) else tokens


def out(x):
    return numpy(x["out"] if isinstance(x, dict) else x)


# --- Ways of calling, which obey ------------------------------------------------------------------


def around(model, given):
    x = keras.tree.map_structure(lambda x: keras.Input((7,), dtype="int32"), given)
    return keras.Model(x, model(x))


def reloaded(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def stateless(model, given, folder):
    trained, others = model.trainable_variables, model.non_trainable_variables
    variables = [[w.value for w in group] for group in (trained, others)]
    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, given)
    return model.stateless_call(*variables, tensors)[0]


def under_a_head(model, given, folder):
    """A head on the tensors of the model, which calls it whole."""
    head = layers.Activation("linear")(model.outputs[0])
    return keras.Model(graph_of(model).input, head)(given)


def with_more(model, given, folder):
    more = hm.apply_head_masks(model, hm.Full(), existing="and", ignore="")
    return more(given)


WAYS = {
    "predict": lambda model, given, folder: model.predict(given, verbose=0),
    "stateless_call": stateless,
    "a layer": lambda model, given, folder: around(model, given)(given),
    "a head": under_a_head,
    "a file": lambda model, given, folder: reloaded(model, folder)(given),
    "a file around it": lambda model, given, folder: reloaded(around(model, given), folder)(given),
    "a pickle": lambda model, given, folder: pickle.loads(pickle.dumps(model))(given),
    "a copy": lambda model, given, folder: copy.deepcopy(model)(given),
    "a rule on top": with_more,
}
OF_GRAPHS = "a head", "a rule on top"


@pytest.mark.parametrize("kind", KINDS)
def test_it_obeys_whenever_it_is_called(kind, tmp_path):
    for rule in (CHUNK, BY_IDS):
        stock, masked = masked_of(kind, rule)
        given, changed = given_to(masked), given_to(masked, CHANGED)
        wanted = out(masked(given))
        assert set(hm.mask_specs(masked).values()) == {rule}
        moved = abs(out(masked(changed)) - wanted).max(-1)
        assert moved[:, :2].max() == 0 < moved[:, 5].min()
        assert abs(wanted - out(stock(given))).max() > 1e-3
    for way, run in WAYS.items():
        if kind != "subclassed" or way not in OF_GRAPHS:
            assert_close(out(run(masked, given, tmp_path)), wanted, depth=3, message=way)
    free = hm.unmasked(masked)
    assert type(free) is type(stock)
    assert not hm.mask_specs(free)
    np.testing.assert_array_equal(out(free(given)), out(stock(given)))


@pytest.mark.parametrize("kind", ["one layer", "sequential", "a dict"])
def test_inputs_that_only_rules_read_come_and_go(kind, tmp_path):
    """With the rule: a file of the stock model has none, and is made of the stock config."""
    stock = KINDS[kind]()
    rule = hm.SameSegment("parts")
    masked = hm.apply_head_masks(stock, rule, add_inputs=True, ignore="")
    parts = np.array([[0, 0, 1, 1, 1, 2, 2]] * 2, "int32")
    given = {"token_ids": TOKENS, "parts": parts}
    given = given if kind == "a dict" else [TOKENS, parts]
    assert {x.name for x in masked.inputs} == {"token_ids", "parts"}
    stock_config, filed = map(keras.saving.serialize_keras_object, (stock, masked))
    assert filed["config"]["model"]["config"] == stock_config["config"]
    assert filed["module"] == "keras_headmask"  # without which Keras finds no class to load
    again = reloaded(masked, tmp_path)
    wanted = out(masked(given))
    for model in (again, hm.apply_head_masks(again, hm.Full(), existing="and", ignore="")):
        np.testing.assert_array_equal(out(model(given)), wanted)
    for model in (masked, again):
        free = hm.unmasked(model)
        assert [x.name for x in free.inputs] == ["token_ids"]
        np.testing.assert_array_equal(out(free(given_to(stock))), out(stock(given_to(stock))))
    head = keras.Model(graph_of(again).input, layers.Dense(2)(again.outputs[0]))
    assert_close(out(reloaded(head, tmp_path)(given)), out(head(given)))


def test_a_subclassed_model_says_what_its_call_lacks():
    masked = hm.apply_head_masks(subclassed(), hm.SameSegment("parts"), "self", ignore="")
    lacks = (
        r"reads \['parts'\], and this call of 'subclassed\w*' lacks \['parts'\].*\['token_ids'\]"
    )
    with pytest.raises(ValueError, match=lacks):
        masked(TOKENS)


def test_a_head_is_fitted_and_exported(tmp_path):
    masked = apply(stack(1), BY_IDS)
    head = keras.Model(masked.input, layers.Dense(1)(masked.output))
    head.compile("sgd", "mse", jit_compile=False)
    before = masked.get_weights()
    head.fit(TOKENS, np.ones((2, 7, 1), "float32"), verbose=0)
    assert max(abs(a - b).max() for a, b in zip(masked.get_weights(), before, strict=True)) > 0
    assert leak(head, position=5, rows=slice(0, 2)) == 0 < leak(head, position=5, rows=slice(5, 6))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        sequential = hm.apply_head_masks(KINDS["sequential"](), BY_IDS, ignore="")
        for model in (head, around(sequential, TOKENS)):  # TensorFlow traces models inside, too
            model.export(tmp_path / "export", verbose=False)
            loaded = tf.saved_model.load(str(tmp_path / "export"))
            served = loaded.serve(tf.constant(TOKENS))
            assert_close(numpy(served), numpy(model(TOKENS)), depth=3)


# --- What is built from layers inside -------------------------------------------------------------

ALONE = r"(?s)of the masked model '.*Mask last: .*call the masked model as a layer"


def inside(model):
    """A layer of the graph that holds attention."""
    return next(x for x in model.layers if attention(x))


def cut(model, folder):
    keras.Model(graph_of(model).input, inside(model).output)(given_to(model))


def cut_as_a_layer(model, folder):
    part = keras.Model(graph_of(model).input, inside(model).output)
    around(part, given_to(model))(given_to(model))


def alone(model, folder):
    attention(model)[0](x := normal(2, 7, 8), x)


def in_a_graph(model, folder):
    x = keras.Input((7, 8))
    keras.Model(x, attention(model)[0](x, x))(normal(2, 7, 8))


REFUSED = {
    "a cut": cut,
    "a cut as a layer": cut_as_a_layer,
    "a layer alone": alone,
    "a graph of it": in_a_graph,
    "its config": lambda model, folder: attention(model)[0].get_config(),
    "its copy": lambda model, folder: copy.deepcopy(attention(model)[0]),
    "a clone": lambda model, folder: keras.models.clone_model(model),
    "a clone of other layers": lambda model, folder: keras.models.clone_model(
        model, clone_function=lambda layer: layers.Identity()
    ),
    "a rule for it": lambda model, folder: hm.apply_head_masks(
        keras.Model(graph_of(model).input, inside(model).output), CHUNK, existing="and", ignore=""
    ),
}


@pytest.mark.parametrize("kind", ["one layer", "composites", "nested", "sequential", "shared"])
@pytest.mark.parametrize("rule", [CHUNK, BY_IDS], ids=["positions", "ids"])
def test_what_is_built_from_layers_inside_is_refused(kind, rule, tmp_path):
    _, masked = masked_of(kind, rule)
    wanted = out(masked(TOKENS))
    for way, build in REFUSED.items():
        if kind == "nested" and way in ("a cut", "a cut as a layer", "a rule for it"):
            continue  # a model of its own: see below
        message = "has a rule of the model" if way == "a rule for it" else ALONE
        with pytest.raises(ValueError, match=message):  # noqa: PT012  (to say which way)
            build(masked, tmp_path)
            pytest.fail(way)
    np.testing.assert_array_equal(out(masked(TOKENS)), wanted)


def test_whole_models_in_hdf5_are_refused(tmp_path):
    masked = apply(stack(1), CHUNK)
    for model in (masked, around(masked, TOKENS)):
        with pytest.raises(ValueError, match=r"HDF5 cannot hold the rules of 'stack'.*model.keras"):
            model.save(tmp_path / "model.h5")


@pytest.mark.parametrize("rule", [CHUNK, BY_IDS], ids=["positions", "ids"])
def test_a_model_inside_obeys_alone_if_it_gets_the_same_inputs(rule):
    """As the backbone of a task; with other ids, as those of a sequence that is turned, not."""
    ids = token_ids()
    for change, obeys in ((lambda x: x, True), (lambda x: keras.ops.flip(x, 1), False)):
        outer = keras.Model(ids, stack(1)(change(ids)))
        masked = apply(outer, rule)
        inner = masked.get_layer("stack")
        wanted = numpy(masked(TOKENS if obeys else TOKENS[:, ::-1]))
        if obeys or rule is CHUNK:
            x = keras.Input((None,), dtype="int32")
            for got in (
                inner(TOKENS),
                inner.predict(TOKENS, verbose=0),
                keras.Model(x, inner(x))(TOKENS),
            ):
                assert_close(numpy(got), wanted, depth=3)
        else:
            with pytest.raises(ValueError, match=ALONE):
                inner(TOKENS)
        with pytest.raises(ValueError, match=ALONE):
            inner.get_config()
        with pytest.raises(ValueError, match=ALONE):
            hm.apply_head_masks(inner, rule, existing="and", ignore="")


def test_a_rule_from_around_adds_and_replaces_nothing(tmp_path):
    inner = apply(stack(1), CHUNK)
    outer = around(inner, TOKENS)
    refused = r"has a rule of the model 'stack' inside, which .*Give this rule to that model"
    with pytest.raises(ValueError, match=refused):
        apply(outer, hm.Window(3, 3), existing="replace")
    both = apply(outer, hm.Window(1, 1), existing="and")
    for model in (both, reloaded(both, tmp_path)):
        assert list(hm.mask_specs(model).values()) == [CHUNK & hm.Window(1, 1)]
        np.testing.assert_array_equal(numpy(model(TOKENS)), numpy(both(TOKENS)))
    assert leak(both, rows=slice(2, 3), position=0) == 0 < leak(outer, rows=slice(2, 3), position=0)
    np.testing.assert_array_equal(
        numpy(hm.unmasked(both)(TOKENS)), numpy(hm.unmasked(inner)(TOKENS))
    )
    with pytest.raises(ValueError, match=r"rule of the model 'functional\w*' around\. Give this"):
        apply(next(x for x in both.layers if attention(x)), CHUNK, existing="replace", copy=False)
