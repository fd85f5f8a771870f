"""Steps of a cached decoder equal its whole forward; planted faults are named."""

import keras
import numpy as np
import pytest

from keras_headmask.heads.testing import assert_steps_equal

X = np.random.default_rng(0).normal(size=(2, 6, 4))


def attend(x, keys, offset):
    allowed = np.arange(len(keys[0])) <= np.arange(x.shape[1])[:, None] + offset
    weights = np.where(allowed, np.exp(x @ keys.swapaxes(1, 2)), 0)
    return weights / weights.sum(-1, keepdims=True) @ keys


def whole(x):
    return attend(x, x, 0)


def step(x, cache, window=None, late=0):
    keys = x if cache is None else np.concatenate([cache, x], 1)
    outputs = attend(x, keys, keys.shape[1] - x.shape[1] - late)
    return outputs, keys[:, -window:] if window else keys


@pytest.mark.parametrize("prompt", [1, 3, 5])
def test_steps_of_a_cache(prompt):
    assert_steps_equal(step, whole, X, prompt)
    assert_steps_equal(
        lambda x, cache: ({"y": step(x["x"], cache)[0]}, step(x["x"], cache)[1]),
        lambda x: {"y": whole(x["x"]), "loss": 3.0},
        {"x": X},
        prompt,
    )


def test_a_cache_that_forgets_is_named():
    off = np.abs(attend(X[:, 3:4], X[:, 1:4], 2) - whole(X)[:, 3:4]).max((1, 2))
    words = rf"3 to 3 differs .* by {off.max():.2g} in .* 'output' of example {off.argmax()} at pos"
    with pytest.raises(AssertionError, match=words):
        assert_steps_equal(lambda x, cache: step(x, cache, window=2), whole, X)


def test_a_prompt_whose_first_query_sees_nothing_is_named():
    with np.errstate(invalid="ignore"), pytest.raises(AssertionError, match=r"to 2 .* by inf in"):
        assert_steps_equal(lambda x, cache: step(x, cache, late=1), whole, X, prompt=3)


def test_a_state_that_starts_full():
    """As where a cache is allocated once, and a number says how much of it is used."""

    def stepped(x, state):
        cache, used = state
        cache[:, used : used + x.shape[1]] = x
        return attend(x, cache[:, : used + x.shape[1]], used), (cache, used + x.shape[1])

    assert_steps_equal(stepped, whole, X, state=(np.zeros_like(X), 0))


def test_a_keras_model_is_the_whole():
    x = keras.Input((None, 4))
    model = keras.Model(x, keras.layers.Dense(3)(x))
    assert_steps_equal(lambda x, state: (model(x), state), model, X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((lambda x, s: x, whole, X), ValueError, "`step` must return a pair of its outputs"),
        ((lambda x, s: None, whole, X), TypeError, "cannot unpack"),
        ((lambda x, s: ({"y": x}, s), whole, X), ValueError, "by the names of those of `whole`"),
        ((lambda x, s: (x[:, 0], s), whole, X), ValueError, r"float64 \(2, 4\) for 1 positions of"),
        ((lambda x, s: (None, s), whole, X), TypeError, "`step` must return arrays of numbers"),
        ((step, whole, X, 6), ValueError, r"more positions than `prompt`. .*\[6\], and .* of 6"),
        ((step, whole, [X, X[:, :4]]), ValueError, r"must have one length, .* lengths \[4, 6\]"),
        ((step, whole, X, 0), ValueError, "`prompt`"),
        ((step, lambda x: x * np.nan, X), AssertionError, "are NaN, so nothing is proven"),
    ],
)
def test_what_proves_nothing_is_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        assert_steps_equal(*arguments)
