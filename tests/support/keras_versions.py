"""What older versions of Keras lack, for the tests that need it."""

import inspect

import keras
import pytest

HAS = set(inspect.signature(keras.layers.MultiHeadAttention).parameters)


def numbers(version):
    """The major and the minor version, to compare."""
    return tuple(map(int, version.split(".")[:2]))


# There the model could not be made: Keras says "`inputs` not connected to `outputs`".
takes_unread_inputs = pytest.mark.skipif(
    numbers(keras.__version__) < (3, 14),
    reason=f"a model of Keras {keras.__version__} has no input that no layer reads",
)
# There Keras infers one output, by `compute_output_shape`, whatever arguments a call has.
groups_give_scores = pytest.mark.skipif(
    numbers(keras.__version__) < (3, 15),
    reason=f"in a graph, grouped-query attention of Keras {keras.__version__} returns no scores",
)


def needs(argument):
    """Skip on a version of Keras whose attention has no such argument."""
    reason = f"Keras {keras.__version__} has no `{argument}`"
    return pytest.mark.skipif(argument not in HAS, reason=reason)
