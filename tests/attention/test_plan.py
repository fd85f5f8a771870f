"""What TensorFlow's plan computes apart from its tiles: keys that all see, queries that see all."""

import dataclasses

import numpy as np
import pytest
from tiled_contract import attend, close, operands
from tiled_contract import tiles as tiny

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning, tuned
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow
LENGTH = 1024
IDS = np.isin(np.arange(LENGTH), (3, 400, 700, 1020))[None] * np.int32(1)


@hm.register_spec("test_unset")
@dataclasses.dataclass(frozen=True)
class Unset(hm.MaskSpec):
    """A kind of a user's own: the keys whose flag is not set."""

    @property
    def inputs(self):
        return {"ids": hm.InputType(dtype="bool", sides=frozenset({"key"}))}

    def allowed(self, query_positions, key_positions, inputs):
        return ~inputs["ids"].key

    def coverage(self, tiles, inputs):
        flags = inputs["ids"].key
        return hm.Bounds(flags.low < 1, flags.high < 1)


RULES = {
    "keys": (hm.KeyIn("ids", 1), IDS),
    "queries": (hm.QueryFlag("ids"), IDS),
    "own kind": (Unset(), IDS < 1),
}


@pytest.mark.parametrize("name", RULES)
def test_few_flags_open_no_block(name):
    from keras_headmask.attention.tensorflow.plan import planned

    leaf, ids = RULES[name]
    rule = hm.Window(63, 0) | leaf
    bound = evaluation.bind(rule, {"ids": ids}, LENGTH, LENGTH, batch=1)
    plan = planned(Part(rule, (0,), bound, 1.0, Tuning()))
    (tiles, tile), apart = plan.queries.shape, int(name == "queries")  # a tile more, of all keys
    assert tiles == LENGTH // tile + apart
    assert (plan.counts[apart:] <= (63 + tile + 31) // 32).numpy().all()


@pytest.mark.parametrize("joined", ["or", "both ways"])
def test_a_flag_of_any_kind_is_read_as_its_coverage_says(joined):
    few = np.arange(23)[None] % np.array([[5], [9]]) > 0
    rule = hm.Window(1, 1) | Unset()
    if joined == "both ways":
        rule &= hm.Window(4, 0) | ~Unset()
    qkv = operands(2, 23, 23, 3)
    with tiny(), tuned(most_logits_of_a_step=2**20):  # tiles of several widths in one step
        close(attend(qkv, rule, {"ids": few}), attend(qkv, rule, {"ids": few}, tiled=False))
