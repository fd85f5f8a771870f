"""The planner: a sound answer, and the same by NumPy and by the arrays of each backend."""

import keras
import numpy as np
import oracle
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEW, cases

from keras_headmask.attention import planner
from keras_headmask.rules import evaluation
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.protocol import Sides


def arrays_here():
    """Those of the backend."""
    if keras.backend.backend() == "tensorflow":
        from keras_headmask.attention.tensorflow.plan import _ARRAYS

        return _ARRAYS
    if keras.backend.backend() == "jax":
        return planner.NUMPY
    from keras_headmask.attention.torch.block_masks import _arrays

    return _arrays("cpu")


def in_numpy(leaf_inputs):
    def array(value):
        if isinstance(value, Sides):
            return Sides(*(None if side is None else numpy(side) for side in value))
        return numpy(value)

    return {
        leaf: {name: array(value) for name, value in inputs.items()}
        for leaf, inputs in leaf_inputs.items()
    }


@FEW
@given(cases(), st.integers(1, 4), st.integers(1, 4))
def test_what_is_not_possible_is_hidden_and_what_is_certain_is_allowed(case, tile, block):
    """By NumPy, and by the backend."""
    spec, inputs, batch, heads, queries, keys, offset = case
    for rule, members in head_groups(spec, heads):
        read = {name: inputs[name] for name in rule.inputs}
        bound = evaluation.bind(rule, read, queries, keys, offset)
        allowed = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)[:, members[0]]
        arrays_inputs = in_numpy(bound.leaf_inputs)
        leaf_inputs = arrays_inputs if keras.backend.backend() == "jax" else bound.leaf_inputs
        rest = (queries, keys), (tile, block), offset
        found = {
            "NumPy": planner.bounds_of(rule, arrays_inputs, *rest, planner.NUMPY),
            "backend": planner.bounds_of(rule, leaf_inputs, *rest, arrays_here()),
        }
        for of in found.values():
            possible, certain = (np.broadcast_to(numpy(x), (batch, *x.shape[1:])) for x in of)
            assert not (certain & ~possible).any()
            for (example, i, j), may_be in np.ndenumerate(possible):
                rows, columns = slice(i * tile, (i + 1) * tile), slice(j * block, (j + 1) * block)
                pairs = allowed[example, rows, columns]
                assert may_be or not pairs.any()
                assert pairs.all() or not certain[example, i, j]
        possible, certain = zip(
            *(map(numpy, found[name]) for name in ("NumPy", "backend")), strict=True
        )
        np.testing.assert_array_equal(*np.broadcast_arrays(*possible))
        np.testing.assert_array_equal(*np.broadcast_arrays(*certain))
