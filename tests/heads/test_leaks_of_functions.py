"""Leaks of any function of arrays: planted ones, against one change at a time by loops."""

import dataclasses
from collections import OrderedDict

import keras
import numpy as np
import pytest

import keras_headmask as hm
from keras_headmask.heads import leaks as engine

CAUSAL = hm.recipes.causal()
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(12, 4))
IDS = RNG.integers(1, 12, (3, 6))
FLOATS = RNG.normal(size=(3, 6, 4))
DOCUMENTS = np.array([[0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 7], [1, 2, 3, 4, 5, 6]])


def attend(x, allowed):
    logits = np.where(allowed, x @ x.swapaxes(1, 2), -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return x + weights / weights.sum(-1, keepdims=True) @ x


def causal(x):
    return attend(x, np.tri(x.shape[1], dtype=bool))


def one_behind(x):
    """Each query sees one key too far ahead."""
    return attend(x, np.tri(x.shape[1], k=1, dtype=bool))


def across_documents(inputs):
    """Query 3 sees key 1, whatever documents these are of."""
    ids, documents = inputs["ids"], inputs["documents"]
    allowed = (documents[:, :, None] == documents[:, None]) & np.tri(ids.shape[1], dtype=bool)
    allowed[:, 3, 1] = True
    return attend(TABLE[ids], allowed)


def over_the_batch(x):
    return x - x.mean(0, keepdims=True)


def one_change_at_a_time(function, inputs, rule):
    """The plain definition, by loops: (name, example, position, output example and position)."""
    before = function(inputs)
    batch, length = before.shape[:2]
    allowed = keras.ops.convert_to_numpy(
        hm.make_mask(rule, length, length, 2, {k: inputs[k] for k in rule.inputs})
    )
    allowed = np.broadcast_to(allowed.any(1), (batch, length, length))
    named = inputs if isinstance(inputs, dict) else {"inputs[0]": inputs}
    leaks = set()
    for name in named.keys() - rule.inputs.keys():
        for example in range(batch):
            for position in range(length):
                other = named[name].copy()
                is_id = other.dtype.kind == "i"
                value = other[example, position]
                other[example, position] = value % 11 + 1 if is_id else value + 1
                changed = {**named, name: other} if isinstance(inputs, dict) else other
                moved = np.abs(function(changed) - before).max(-1) > 1e-6
                for at, row in np.argwhere(moved).tolist():
                    may = at == example and (row == position or allowed[at, row, position])
                    if not may:
                        leaks.add((name, example, position, at, row))
    return leaks


def places(report):
    return {
        (x.input, x.example, x.position, x.output_example, x.output_position) for x in report.leaks
    }


@pytest.mark.parametrize(
    ("function", "inputs", "rule"),
    [
        (causal, FLOATS, CAUSAL),
        (one_behind, FLOATS, CAUSAL),
        (one_behind, FLOATS, hm.Window(1, 0)),
        (over_the_batch, FLOATS, hm.Window(0, 0)),
        (lambda x: x[::-1] + x, FLOATS, CAUSAL),
        (lambda x: one_behind(TABLE[x]), IDS, CAUSAL),
        (
            across_documents,
            {"ids": IDS, "documents": DOCUMENTS},
            CAUSAL & hm.SameSegment("documents"),
        ),
    ],
)
def test_leaks_are_those_of_one_change_at_a_time(function, inputs, rule):
    expected = one_change_at_a_time(function, inputs, rule)
    report = hm.find_leaks(function, inputs, rule)
    assert {x for x in places(report) if x[0] != "documents"} == expected
    assert bool(expected) == (function is not causal)


def test_many_changes_run_as_one_batch(monkeypatch):
    sizes = []

    def counting(x):
        sizes.append(len(x))
        return one_behind(x)

    stacked = hm.find_leaks(counting, FLOATS, CAUSAL)
    # Two runs and a shorter one; of each example in two draws; and in two draws the batch beside a
    # copy of it for each of 5 positions.
    assert sizes == [3] * (2 + 1 + 3 * 2) + [3 * 6] * 2
    monkeypatch.setattr(engine, "_STACKED", 1)
    sizes.clear()
    assert places(hm.find_leaks(counting, FLOATS, CAUSAL)) == places(stacked)
    assert set(sizes) == {3}


def test_a_fixed_batch_is_changed_one_by_one():
    def fixed(x):
        if len(x) != 3:
            raise RuntimeError("I take 3 examples.")
        return one_behind(x)

    report = hm.find_leaks(fixed, FLOATS, CAUSAL)
    assert places(report) == places(hm.find_leaks(one_behind, FLOATS, CAUSAL))


def test_one_example_of_a_function_that_mixes_the_batch():
    """Copies of it in a stack would affect each other; the unchanged copy shows it."""
    report = hm.find_leaks(lambda x: causal(over_the_batch(x) + x), FLOATS[:1], CAUSAL)
    assert not report
    assert report.tried == report.pairs == 15


def test_an_error_of_the_function_is_its_own():
    def fails(x):
        raise RuntimeError("No such weights.")

    with pytest.raises(RuntimeError, match="No such weights"):
        hm.find_leaks(fails, FLOATS, CAUSAL)


@dataclasses.dataclass
class Outputs:
    logits: object
    cache: object


class ModelOutput(OrderedDict):
    """As Hugging Face's: a dict of a class of its own."""


@pytest.mark.parametrize(
    ("packed", "name"),
    [
        (lambda y: {"logits": y}, "logits"),
        (lambda y: (y, y.mean()), "output 0"),
        (lambda y: ModelOutput(logits=y, cache=object(), states=(y * 0, None)), "logits"),
        (lambda y: Outputs(y, None), "output"),
        (lambda y: Outputs(y, object()), "output logits"),
    ],
)
def test_outputs_in_nests(packed, name):
    report = hm.find_leaks(lambda x: packed(one_behind(x)), FLOATS, CAUSAL)
    assert {leak.output for leak in report.leaks} == {name}
    assert len(report.leaks) == 15
    has_cache = "<object" in str(packed(FLOATS))
    assert ("cache' was left out: a object is no array of numbers" in str(report)) == has_cache


def test_what_returns_no_arrays_is_an_error():
    with pytest.raises(TypeError, match=r"must return arrays of numbers.*Received: \['object'\]"):
        hm.find_leaks(lambda x: {"cache": object()}, FLOATS, CAUSAL)


def test_a_function_needs_a_rule():
    with pytest.raises(ValueError, match=r"The function has no layers to read\. Pass it as `rule`"):
        hm.find_leaks(causal, FLOATS)


def test_a_function_that_draws_random_numbers_is_an_error():
    rng = np.random.default_rng(0)
    message = (
        r"differs in two runs on the same inputs\. `find_leaks` needs a deterministic model: sw"
    )
    with pytest.raises(ValueError, match=message):
        hm.find_leaks(lambda x: causal(x) + rng.normal(size=x.shape), FLOATS, CAUSAL)


def test_nan_proves_nothing():
    report = hm.find_leaks(lambda x: x * np.nan, FLOATS, CAUSAL)
    assert str(report).startswith("Nothing was tried, so nothing is proven.")
    with pytest.raises(AssertionError, match="Nothing was tried"):
        hm.testing.assert_no_leaks(lambda x: x * np.nan, FLOATS, CAUSAL)


@pytest.mark.parametrize("named", [True, False])
def test_padding_of_a_function(named):
    """An input named so says it, or `real`: no real token may see padding."""
    mask = np.arange(6) < np.array([[6], [4], [3]])
    inputs = {"ids": IDS, "attention_mask": mask}

    def masked(inputs):
        return attend(TABLE[inputs["ids"]], inputs["attention_mask"][:, None])

    def careless(inputs):
        return attend(TABLE[inputs["ids"]], True)

    arguments = (inputs, hm.Full()) if named else ({"ids": IDS, "m": mask}, hm.Full(), mask)
    if not named:
        masked, careless = (
            lambda x, f=f: f({"ids": x["ids"], "attention_mask": x["m"]})
            for f in (masked, careless)
        )
    sealed = hm.find_leaks(masked, *arguments)
    assert not sealed
    assert sealed.tried == sealed.pairs == 4 * 2 + 3 * 3
    leaking = hm.find_leaks(careless, *arguments)
    assert len(leaking.leaks) == leaking.pairs == sealed.pairs


# --- Other frameworks -----------------------------------------------------------------------------


def test_torch():
    torch = pytest.importorskip("torch")
    embed = torch.nn.Embedding(12, 4, dtype=torch.bfloat16)

    def model(ids):
        assert ids.dtype == torch.int64
        return torch.cumsum(embed(ids), 1)  # with its graph

    ids = torch.tensor(IDS)
    assert not hm.find_leaks(model, ids, CAUSAL, tolerance=1e-2)
    assert hm.find_leaks(lambda x: model(x) + embed(x).mean(1, True), ids, CAUSAL)


def test_jax():
    jnp = pytest.importorskip("jax").numpy
    x = jnp.asarray(FLOATS, "float32")
    assert not hm.find_leaks(lambda x: x.at[:, 0].set(0) + jnp.cumsum(x, 1), x, CAUSAL)
    assert hm.find_leaks(lambda x: x + x.mean(1, keepdims=True), x, CAUSAL)


@pytest.mark.tensorflow
def test_tensorflow():
    import tensorflow as tf

    x = tf.constant(FLOATS, "float32")
    assert not hm.find_leaks(lambda x: tf.cumsum(x, 1), x, CAUSAL)
    assert hm.find_leaks(lambda x: [x[0] + tf.reduce_mean(x[0], 1, keepdims=True)], [x], CAUSAL)
