"""Biases by position are values, and give what the papers' and Hugging Face's code gives."""

import changed
import keras
import numpy as np
import oracle
import pytest
from contract import gradient
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from laws import weights
from strategies import FEW
from tiled_contract import SCALE, attend, close, operands

import keras_headmask as hm
from keras_headmask.attention.biases import PositionBias

VALUES = [hm.alibi(3), hm.relative_position_bias(2, 6, 9, bidirectional=False)]


def positions(count, offset=0):
    return ops.arange(count, dtype="int32") + offset


@FEW
@given(st.integers(1, 70), st.integers(0, 9))
def test_alibi_is_the_formula_of_the_paper(heads, offset):
    made = hm.alibi(heads).tile_bias(positions(3, offset), positions(7), range(heads))
    wanted = changed.alibi(heads, 3, 7, offset)
    np.testing.assert_allclose(ops.convert_to_numpy(made)[0], wanted, rtol=1e-6)


@FEW
@given(st.integers(2, 20), st.integers(1, 300), st.booleans(), st.integers(0, 200))
def test_buckets_are_those_of_t5(half, farther, bidirectional, offset):
    sides = 2 if bidirectional else 1
    value = hm.relative_position_bias(2, half * sides, half // 2 + farther, bidirectional)
    made = value.buckets(positions(300) - positions(2, offset)[:, None])
    wanted = changed.buckets(value, 2, 300, offset)
    np.testing.assert_array_equal(ops.convert_to_numpy(made), wanted)


@pytest.mark.tensorflow  # one backend is enough
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.long
def test_hugging_face_has_the_same(bidirectional):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    value = hm.relative_position_bias(8, bidirectional=bidirectional)
    made = ops.convert_to_numpy(value.buckets(positions(400) - positions(400)[:, None]))
    ahead = torch.arange(400)[None] - torch.arange(400)[:, None]
    theirs = t5.T5Attention._relative_position_bucket(ahead, bidirectional, 32, 128)
    np.testing.assert_array_equal(made, theirs.numpy())
    for heads in (1, 6, 8, 12, 25):
        of_key = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
        theirs = of_key.reshape(heads, 2)[:, 1].numpy()
        np.testing.assert_allclose(hm.alibi(heads).slopes, theirs, rtol=1e-6)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_they_are_values(value):
    again = PositionBias.from_config(value.get_config())
    assert again == value
    assert hash(again) == hash(value)
    assert value != hm.alibi(9)
    saved = keras.saving.serialize_keras_object(value)
    assert keras.saving.deserialize_keras_object(saved) == value
    assert type(value).from_config(value.get_config()) == value


def test_configs_have_permanent_kinds():
    assert hm.alibi(3).get_config() == {"kind": "alibi", "num_heads": 3}
    assert hm.relative_position_bias(2).get_config() == {
        "kind": "relative_position",
        "num_heads": 2,
        "num_buckets": 32,
        "max_distance": 128,
        "bidirectional": True,
    }


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: hm.alibi(0), ValueError, "`num_heads` must be at least 1"),
        (lambda: hm.alibi(2.0), TypeError, "`num_heads` must be a whole number"),
        (lambda: hm.relative_position_bias(2, 5), ValueError, "`num_buckets` must be even"),
        (lambda: hm.relative_position_bias(2, 2), ValueError, "`num_buckets` must be at least 4"),
        (lambda: hm.relative_position_bias(2, 32, 8), ValueError, "must be at least 9"),
        (lambda: hm.relative_position_bias(2, 8, 2**21), ValueError, "must be at most 1048576"),
        (lambda: hm.relative_position_bias(2, bidirectional=1), TypeError, "must be True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_a_rule_minus_inf_hides_what_is_not_finite(bad):
    """As a mask does: from rows that see other keys, and from a row that sees none."""
    qkv = operands(3, 5, 8, 2)
    bias = np.zeros((3, 1, 5, 8), "float32")
    bias[:, :, :, 6] = bias[:, :, 2] = -np.inf
    qkv[1][1, 6], qkv[2][2, 6] = bad, bad
    mask, upstream = np.repeat(bias == 0, 2, axis=1), weights(3, 5, 2)
    wanted, exact = oracle.with_gradients(*qkv, mask, SCALE, upstream)

    def total(*qkv):
        context = attend(qkv, None, tiled=None, bias=ops.convert_to_tensor(bias))
        return ops.sum(context * ops.convert_to_tensor(upstream))

    close(attend([*map(ops.convert_to_tensor, qkv)], None, tiled=None, bias=bias), wanted)
    for made, name in zip(gradient(total, *qkv), exact, strict=True):
        close(made, exact[name], name)
