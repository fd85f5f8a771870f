"""What is made once in a graph, and what counts as equal."""

import functools
import itertools

import keras
import numpy as np
import pytest

import keras_headmask as hm
from keras_headmask.rules.graphs import first_equal, once

pytestmark = pytest.mark.tensorflow


def numbers_of(*keys):
    """For each key a number: the same where what is made is."""
    count = itertools.count()
    return [once(lambda: next(count), first_equal(key)) for key in keys]


def traced(function, *specs):
    """What `function` gives for the symbolic tensors of a graph."""
    import tensorflow as tf

    found = []
    given = [tf.TensorSpec(shape, dtype) for shape, dtype in specs or [((None, 3), tf.int32)]]
    tf.function(
        lambda *x: found.append(function(*x)), given, autograph=False
    ).get_concrete_function()
    return found[-1]


def branches():
    """Pairs of computations of `(N, 3)` ids, by name."""
    import tensorflow as tf

    table = np.arange(400, dtype="int32")
    return {
        "a tensor": lambda x: x,
        "an operation": lambda x: x != 0,
        "another constant": lambda x: x != 1,
        "another constant dtype": lambda x: tf.cast(x, tf.int64) != 0,
        "a chain": lambda x: tf.cast(tf.cumsum(tf.cast(x != 0, tf.int32), 1) > 2, tf.int32),
        "another attribute": lambda x: tf.cumsum(x, 1, exclusive=True),
        "no such attribute": lambda x: tf.cumsum(x, 1),
        "operands": lambda x: x - tf.reverse(x, [1]),
        "operands in another order": lambda x: tf.reverse(x, [1]) - x,
        "the first result": lambda x: tf.unstack(x, axis=1)[0],
        "the second result": lambda x: tf.unstack(x, axis=1)[1],
        "a constant": lambda x: tf.constant([1, 2, 3]),
        "a constant of another dtype": lambda x: tf.constant([1, 2, 3], tf.int64),
        "a constant of another shape": lambda x: tf.constant([[1, 2, 3]]),
        # These are not known to be equal.
        "what may be fed": lambda x: tf.compat.v1.placeholder_with_default(0, []),
        "random numbers of a seed": lambda x: tf.random.stateless_uniform([3], [1, 2]),
        "random numbers": lambda x: tf.random.uniform([3], seed=1),
        "a large constant": lambda x: tf.gather(tf.constant(table), x),
        "far from its input": lambda x: functools.reduce(lambda y, _: -y, range(100), x),
    }


APART = [*branches()][-5:] if keras.backend.backend() == "tensorflow" else []


def test_equal_operations_on_equal_tensors_are_equal_and_no_others_are():
    pairs = branches()
    numbers = traced(lambda x: numbers_of(*(make(x) for make in pairs.values() for _ in "ab")))
    first, second = (dict(zip(pairs, numbers[i::2], strict=True)) for i in (0, 1))
    assert {name for name in pairs if first[name] != second[name]} == set(APART)
    assert len(set(first.values())) == len(pairs)


def test_python_values_are_equal_if_their_types_are():
    keys = 1, True, 1.0, "1", (1,), [1], None, np.int32(1), {"a": 1}, {"a": True}
    assert traced(lambda _: numbers_of(*keys, *keys)) == [*range(len(keys))] * 2
    specs = hm.Window(1, 0), hm.Window(1, 0), hm.Window(0, 1), hm.PerHead({0: hm.Window(1, 0)})
    assert traced(lambda _: numbers_of(*specs)) == [0, 0, 1, 2]


def test_arrays_and_variables_are_never_equal():
    """They may have changed."""
    import tensorflow as tf

    array, number = np.arange(3), tf.Variable([1, 2, 3])
    weight = keras.Variable([1, 2, 3])
    for value in (array, number, weight, {"ids": (number, None)}):
        assert traced(lambda _, value=value: numbers_of(value, value)) == [0, 1]

    def reads(_):
        before = number.read_value()
        number.assign_add([1, 1, 1])
        return numbers_of(before, number.read_value())

    assert traced(reads) == [0, 1]


def test_tensors_of_eager_mode_are_equal_if_they_are_one():
    import tensorflow as tf

    x = tf.constant([1, 2, 3])
    assert traced(lambda _: numbers_of(x, tf.identity(x), x))[::2] == [0, 0]

    def gone(_):
        """Each is gone before the next is made, which may lie where it lay."""
        for value in range(50):
            with tf.init_scope():
                ids = tf.constant([value])
            seen.append(once(lambda value=value: value, ids))
            del ids

    seen = []
    traced(gone)
    assert seen == list(range(50))
