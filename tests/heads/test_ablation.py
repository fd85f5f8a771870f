"""What a head is worth is what the metric says of a model without it."""

import dataclasses
import gc
import json
import weakref

import keras
import numpy as np
import pytest
from contract import normal, numpy, random_biases
from small_models import TOKENS, one_layer

import keras_headmask as hm
from keras_headmask.heads.ablation import Ablation, ablate_heads

DATA = normal(2, 6, 8)
HEADS = (2, 3)
EVERY = [(layer, head) for layer, count in enumerate(HEADS) for head in range(count)]
once = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs one backend")


def decoder(names=("first", "second")):
    x = inputs = keras.Input((None, 8))
    for count, name in zip(HEADS, names, strict=True):
        attention = keras.layers.MultiHeadAttention(count, 4, name=name)
        x = x + attention(x, x, use_causal_mask=True)
        random_biases(attention)
    return keras.Model(inputs, x)


def classifier():
    """Compiled with a loss and a metric that no config names, and an optimizer with a state."""

    def farthest(true, predicted):
        return keras.ops.max(keras.ops.abs(true - predicted))

    x = inputs = keras.Input((6, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, keras.layers.Dense(1)(attention(x, x)))
    random_biases(attention)
    model.compile("adam", lambda true, made: 2 * (true - made) ** 2, metrics=["mae", farthest])
    model.fit(DATA, np.ones((2, 6, 1)), verbose=0)
    return model


@pytest.fixture(scope="module")
def model():
    return decoder()


def metric(model):
    return np.square(numpy(model(DATA))).mean()


def without_weights(model, off):
    """The metric where the output kernel is 0 for the heads that are off."""
    names = [x.name for x in model.layers if "MultiHeadAttention" in type(x).__name__]
    before = model.get_weights()
    for layer, head in off:
        kernel = model.get_layer(names[layer]).output_dense.kernel
        values = np.array(keras.ops.convert_to_numpy(kernel))
        values[head] = 0
        kernel.assign(values)
    found = metric(model)
    model.set_weights(before)
    return found


def test_each_head_is_a_model_without_it(model):
    """By masks, one by one, and by weights that are 0."""
    before, outputs = model.get_weights(), numpy(model(DATA))
    found = ablate_heads(model, metric)
    own = metric(model)
    assert found.changes.shape == (2, 3)
    assert np.isnan(found.changes[0, 2])  # the first layer has two heads
    for layer, head in EVERY:
        rule = {str(layer): hm.PerHead({head: hm.Nothing()})}
        change = metric(hm.apply_head_masks(model, rule)) - own
        np.testing.assert_allclose(found.changes[layer, head], change, rtol=1e-5)
        change = without_weights(model, [(layer, head)]) - own
        np.testing.assert_allclose(found.changes[layer, head], change, rtol=1e-3, atol=1e-6)
    assert len({round(x, 7) for x in found.changes.ravel()[[0, 1, 3, 4, 5]]}) == 5
    np.testing.assert_array_equal(numpy(model(DATA)), outputs)
    assert hm.mask_specs(model) == {}
    assert all(map(np.array_equal, model.get_weights(), before))


def with_a_head_of_no_worth():
    """Head 1 writes nothing, and the last tokens are padding."""
    model = one_layer()
    kernel = model.get_layer("attention").output_dense.kernel
    kernel.assign(numpy(kernel) * (np.arange(4) != 1)[:, None, None])
    return model


def of_all_rows(model):
    """A metric to which padding counts."""
    return np.square(numpy(model(TOKENS))).mean()


def test_a_head_that_writes_nothing_is_worth_nothing_beside_padding():
    """Stock attention gives padding a mean of values, and attention under a rule zeros."""
    found = ablate_heads(with_a_head_of_no_worth(), of_all_rows)
    np.testing.assert_allclose(found.changes[0, 1], 0, atol=1e-6)
    assert (abs(found.changes[0, [0, 2, 3]]) > 1e-3).all()


def test_rules_that_the_model_has_hold_too(model):
    window = hm.Window(1, 0)
    masked = hm.apply_head_masks(model, window)
    found = ablate_heads(masked, metric, layers="second")
    assert found.paths == ("second",)
    for head in range(3):
        rule = {"0": window, "1": window & hm.PerHead({head: hm.Nothing()})}
        change = metric(hm.apply_head_masks(model, rule)) - metric(masked)
        np.testing.assert_allclose(found.changes[0, head], change, rtol=1e-5)


def test_a_compiled_model_is_compiled_anew(model):
    """`predict` keeps what it traced first."""

    def predicted(model):
        return np.square(model.predict(DATA, verbose=0)).mean()

    found = ablate_heads(model, predicted, layers="first")
    np.testing.assert_allclose(found.changes[0], ablate_heads(model, metric).changes[0, :2], 1e-4)


def test_copies_evaluate_as_the_model_does():
    """The loss, Keras' metric and one of its own; by what the outputs are."""
    model, true, copies, evaluations = classifier(), np.ones((2, 6, 1)), [], []

    def loss(model):
        copies.append(weakref.ref(model))
        evaluations.append(model.evaluate(DATA, true, verbose=0))
        return evaluations[-1][0]

    def by_hand(model):
        moved = np.abs(numpy(model(DATA)) - true)
        return 2 * (moved**2).mean(), moved.mean(), moved.max()

    ablate_heads(model, loss)
    rules = (hm.Full(), *(hm.PerHead({head: hm.Nothing()}) for head in range(2)))
    wanted = [by_hand(hm.apply_head_masks(model, rule)) for rule in rules]
    np.testing.assert_allclose(evaluations, wanted, rtol=1e-5)
    gc.collect()
    assert [copy() for copy in copies] == [None] * 3  # the losses and metrics keep none of them


@pytest.mark.long
def test_a_metric_that_trains_its_model_trains_a_copy():
    model = classifier()
    before, steps = model.get_weights(), int(model.optimizer.iterations)

    def trained(model):
        model.fit(DATA, np.zeros((2, 6, 1)), verbose=0)
        return metric(model)

    assert np.isfinite(ablate_heads(model, trained).changes).all()
    assert all(map(np.array_equal, model.get_weights(), before))
    assert int(model.optimizer.iterations) == steps


def test_a_model_that_compiles_itself_from_a_config_compiles_its_copies_so():
    made = []

    @keras.saving.register_keras_serializable("tests_of_ablation")
    class Own(keras.Model):
        def compile_from_config(self, config):
            made.append(self)
            super().compile_from_config(config)

    x = keras.Input((6, 8))
    model = Own(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
    model.compile("sgd", "mse")
    ablate_heads(model, lambda model: model.evaluate(DATA, DATA, verbose=0))
    assert len(made) == 3
    assert model not in made


@once
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_greedy_takes_the_best_each_time(model, better):
    """As by all sets of heads, whose weights are 0."""
    found = ablate_heads(model, metric, greedy=True, better=better, steps=3)
    off, best = [], max if better == "higher" else min
    for _ in range(3):
        left = [head for head in EVERY if head not in off]
        off.append(best(left, key=lambda head: without_weights(model, [*off, head])))
    assert found.order == tuple(off)
    metrics = [without_weights(model, off[: i + 1]) for i in range(3)]
    np.testing.assert_allclose(found.steps, metrics, rtol=1e-4)
    assert len(found.values) == 1 + 5 + 4 + 3


@once
def test_greedy_ends_without_heads():
    model = decoder()
    found = ablate_heads(model, lambda model: 1, layers=0, greedy=True)
    assert found.order == ((0, 0), (0, 1))  # of equal heads, the first


# --- Interrupts -----------------------------------------------------------------------------------


class Counted:
    """A metric that raises once it ran so many times."""

    def __init__(self, error=None, at=None):
        self.runs, self.error, self.at = 0, error, at

    def __call__(self, model):
        self.runs += 1
        if self.runs == self.at:
            raise self.error
        return metric(model)


@once
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=repr)
def test_a_sweep_that_ends_early_keeps_what_it_has(model, tmp_path, error):
    file = tmp_path / "ablation.json"
    before = model.get_weights()
    with pytest.raises(type(error)) as raised:
        ablate_heads(model, Counted(error, at=4), save_to=file)
    found = raised.value.ablation
    assert "attribute `ablation` of this exception" in raised.value.__notes__[0]
    assert str(file) in raised.value.__notes__[0]
    assert np.isfinite(found.changes).sum() == 2
    assert "?" in str(found)
    assert Ablation.from_json(json.loads(file.read_text())) == found
    assert all(map(np.array_equal, model.get_weights(), before))
    assert hm.mask_specs(model) == {}
    rest = Counted()
    whole = ablate_heads(model, rest, save_to=file)
    assert rest.runs == 1 + 3  # the model's own again, and the heads that were left
    np.testing.assert_array_equal(whole.changes, ablate_heads(model, metric).changes)
    again = Counted()
    ablate_heads(model, again, save_to=str(file), greedy=True, steps=1)
    assert again.runs == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ablation.json"]


@once
def test_a_note_names_no_file_that_was_not_written(model, tmp_path, monkeypatch):
    file = tmp_path / "ablation.json"
    with pytest.raises(RuntimeError) as raised:
        ablate_heads(model, Counted(RuntimeError(), at=2), save_to=file)
    assert json.loads(file.read_text())["values"].keys() == {""}  # its own, before any head
    assert str(file) in raised.value.__notes__[0]

    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("keras_headmask.heads.ablation._write_whole", full)
    with pytest.raises(OSError, match="full") as raised:
        ablate_heads(model, metric, save_to=file)
    assert raised.value.__notes__[0].endswith("in the attribute `ablation` of this exception.")


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """The file of a whole sweep."""
    file = tmp_path_factory.mktemp("sweep") / "ablation.json"
    ablate_heads(model, metric, save_to=file)
    return json.loads(file.read_text())


@once
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"values": {"": 1.0, "0-0": np.nan}}, "a metric is nan"),
        ({"values": {"": 1.0, "0-99": 1.0}}, "there is no head 99 of layer 0"),
        ({"values": {"": 1.0, "2-0": 1.0}}, "there is no head 0 of layer 2"),
        ({"values": {"": 1.0, "0-0,0--1": 1.0}}, "not enough values to unpack|too many values"),
        ({"order": [[1, 3]]}, "there is no head 3 of layer 1"),
        ({"values": {"0-0": 1.0}}, "the metric without the heads .. is missing"),
        ({"order": [[0, 1], [1, 2]]}, "the metric without the heads .*0, 1.*1, 2.* is missing"),
        ({"order": [[-1, 0]]}, "there is no head 0 of layer -1"),
    ],
    ids=str,
)
def test_a_file_with_what_cannot_be(model, tmp_path, written, wrong, why):
    file = tmp_path / "ablation.json"
    file.write_text(json.dumps(written | wrong))
    with pytest.raises(ValueError, match=rf"ablation.json .`save_to`. is no file of.*({why})"):
        ablate_heads(model, metric, save_to=file)


@once
def test_a_file_of_another_sweep(model, tmp_path):
    file = tmp_path / "ablation.json"
    ablate_heads(model, metric, layers=0, save_to=file)
    kept = file.read_text()
    for other, layers in [(decoder(), 0), (model, 1), (hm.apply_head_masks(model, hm.Full()), 0)]:
        with pytest.raises(ValueError, match=r"ablation.json is of another model, of other lay"):
            ablate_heads(other, metric, layers=layers, save_to=file)
    with pytest.raises(ValueError, match=r"another metric, or of other data: .* and now 7.0. Pass"):
        ablate_heads(model, lambda model: 7, layers=0, save_to=file)
    assert file.read_text() == kept
    for text in ("{", "[]", '{"values": {"a": 1}}', json.dumps({"values": {}, "paths": []})):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"ablation.json .`save_to`. is no file of"):
            ablate_heads(model, metric, layers=0, save_to=file)
    for wrong in (tmp_path, tmp_path / "missing" / "ablation.json"):
        with pytest.raises(ValueError, match="`save_to` must be a file, there or not yet, in a fo"):
            ablate_heads(model, metric, save_to=wrong)


# --- The value ------------------------------------------------------------------------------------

FOUND = Ablation(
    "digest",
    ("a/first", "second"),
    HEADS,
    {(): 0.5, ((0, 0),): 0.25, ((0, 1),): 0.5, ((1, 0),): 0.75, ((0, 1), (1, 0)): 0.625},
    ((1, 0), (0, 1)),
)


@once
def test_it_prints_as_a_table():
    assert str(FOUND).split("\n") == [
        "The metric is 0.5. Switching off one head changes it by:",
        "layer      head 0  head 1  head 2",
        "0 a/first  -0.25   +0",
        "1 second   +0.25   ?       ?",
        "Switched off one after another:",
        "layer 1, head 0  0.75",
        "layer 0, head 1  0.625",
    ]


@once
def test_json_and_back():
    assert Ablation.from_json(json.loads(json.dumps(FOUND.to_json()))) == FOUND
    for other in ([], {}, {"values": {"a": 1}}, {"values": {}, "paths": []}):
        with pytest.raises(ValueError, match=r"must be what `Ablation.to_json` returned. Received"):
            Ablation.from_json(other)


@once
def test_a_heat_map():
    pytest.importorskip("matplotlib")
    nothing = dataclasses.replace(FOUND, values=dict.fromkeys(FOUND.values, 0.5))
    assert nothing.plot().axes[0].images[0].get_clim() == (-1, 1)
    ax, _ = FOUND.plot().axes
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array().filled(np.nan), FOUND.changes)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0 a/first", "1 second"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("heads", "layers")
    assert image.get_clim() == (-0.25, 0.25)  # so that white is 0
    assert ax.figure.get_suptitle() == "Change of the metric, 0.5, with one head switched off"


@once
@pytest.mark.parametrize(
    "value",
    [None, np.nan, np.inf, [0.5, 0.9], {"loss": 1.0}, "0.5", b"3", 10**400, np.ones((30, 30))],
    ids=lambda x: repr(x)[:12],
)
def test_a_metric_that_is_no_finite_number(model, value):
    with pytest.raises(
        ValueError, match=r"one finite number. Received for the model itself: .* pic"
    ) as raised:
        ablate_heads(model, lambda model: value)
    assert len(str(raised.value)) < 300


@once
def test_a_head_whose_metric_is_not_finite(model):
    values = iter([1, 2, 3, np.nan])
    with pytest.raises(ValueError, match="the model without head 0 of layer 1: nan") as raised:
        ablate_heads(model, lambda model: next(values))
    assert raised.value.ablation.changes[0, :2].tolist() == [1, 2]


def test_metrics_are_numbers_of_any_kind(model):
    found = ablate_heads(model, lambda model: keras.ops.mean(model(DATA)), layers=0)
    assert np.isfinite(found.changes).all()


@once
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"better": "up"}, ValueError, '`better` must be "higher" or "lower". Received: \'up\''),
        ({"steps": 2}, ValueError, "`steps` is for `greedy=True`. Received: steps=2"),
        ({"steps": 0, "greedy": True}, ValueError, "`steps` must be at least 1"),
        ({"steps": 1.5, "greedy": True}, TypeError, "`steps` must be a whole number"),
        ({"layers": 2}, ValueError, "no self-attention layer 2"),
        ({"metric": "accuracy"}, TypeError, "`metric` must be a function.*Received: 'accuracy'"),
        ({"model": 3}, TypeError, "`model` must be a Keras model. Received: 3"),
    ],
)
def test_refused(model, arguments, error, message):
    with pytest.raises(error, match=message):
        ablate_heads(**({"model": model, "metric": metric} | arguments))
