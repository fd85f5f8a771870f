"""What the tests of tiles share: tiny tiles, operands, rules that leave gaps."""

import contextlib
import math

import keras
import numpy as np
from contract import numpy
from hypothesis import strategies as st
from keras import ops
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.tuning import current_tuning, tuned

BACKEND = keras.backend.backend()
SCALE = 0.7
# (local tile, wide tile, block): all lengths below are ragged in some of them.
SIZES = ((4, 6, 2), (4, 6, 3), (2, 3, 2), (1, 5, 1))
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 1000)
_ALL = 2**40  # logits
ALWAYS = {"fewest_pairs": 0, "most_computed": 1.0, "most_logits": 0}


@contextlib.contextmanager
def tiles(local=4, wide=6, block=3):
    """Tiny tiles, so that short sequences have several, and few of them, but not one, in a step."""
    step = 30 * local * block
    numbers = {"local_tile": local, "wide_tile": wide, "block": block}
    rest = {"most_logits_of_a_step": step, "most_logits": 0, "one_flagged_in": 4}
    with tuned(**numbers, **rest) as tuning:
        yield tuning


@contextlib.contextmanager
def at_once():
    """What TensorFlow does with few logits."""
    with tuned(most_logits=_ALL) as tuning:
        yield tuning


def operands(batch, queries, keys, heads, seed=0, size=3, value_size=2, key_heads=None):
    rng, key_heads = np.random.default_rng(seed), key_heads or heads

    def normal(length, heads, last):
        return rng.normal(size=(batch, length, heads, last)).astype("float32")

    query = normal(queries, heads, size)
    return query, normal(keys, key_heads, size), normal(keys, key_heads, value_size)


def attend(qkv, spec, inputs=None, offset=0, tiled=True, **rest):
    if tiled and current_tuning().most_logits == _ALL:
        tiled = None  # (`True` would be tiles)

    def run(query, key, value):
        return hm.dot_product_attention(
            query,
            key,
            value,
            mask_spec=spec,
            mask_inputs=inputs or None,
            scale=SCALE,
            query_offset=offset,
            tiled=tiled,
            **rest,
        )

    if BACKEND != "jax":
        return run(*qkv)
    import jax

    return jax.jit(run)(*qkv)  # one compilation, not one for each operation


def weighted(result):
    """A scalar that every entry of `result` has a say in, in its own way."""
    count = math.prod(result.shape)
    weights = np.cos(np.arange(count, dtype="float32")).reshape(tuple(result.shape))
    return ops.sum(ops.cast(result, "float32") * ops.convert_to_tensor(weights))


def close(got, wanted, message=""):
    got = got if isinstance(got, np.ndarray) else numpy(got)
    wanted = wanted if isinstance(wanted, np.ndarray) else numpy(wanted)
    assert_close(got, wanted, message=message, depth=3)


# Longer than the random ones: several tiles and blocks, ragged ones, gaps between runs.
_rng = np.random.default_rng(3)
SORTED_IDS = np.sort(_rng.integers(0, 5, (3, 23))).astype("int32")
UNSORTED_IDS = _rng.integers(-1, 4, (3, 23)).astype("int32")
# The first example lacks what others have: a plan made of it alone for all is seen.
PADDING = np.arange(23)[None] < np.array([9, 23, 1])[:, None]
FLAGS = np.stack([np.isin(np.arange(23), at) for at in ([0, 11, 12], [], [4, 18])])
LONG = {
    "window": (hm.Window(3, 2), {}),
    "window ahead": (hm.Window(-2, 7), {}),
    "causal": (hm.recipes.causal(), {}),
    "dilated": (hm.Window(8, 8, step=4), {}),
    "streaming": (hm.recipes.streaming(sinks=2, window=4), {}),
    "blocks": (hm.Chunk(2, 1, 1) | hm.Queries(0, 2) | hm.Keys(0, 2), {}),
    "not a window": (~hm.Window(4, 4), {}),
    "far keys": (hm.Keys(0, 2) | hm.Keys(10, 12) | hm.Keys(20), {}),
    "two dead ends": (hm.Queries(5, 17) & hm.Window(2, 2), {}),
    "full": (hm.Full(), {}),
    "nothing": (hm.Nothing(), {}),
    "full, flags beside it": (hm.Full() | hm.KeyFlag("flags"), {"flags": FLAGS}),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": SORTED_IDS}),
    "unsorted": (hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "not unsorted": (~hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "sentences": (hm.SameSentence(1, "ids"), {"ids": UNSORTED_IDS}),
    "padding": (hm.KeyFlag("pad") & hm.Window(4, 4), {"pad": PADDING}),
    "padded queries": (hm.KeyFlag("pad") & hm.QueryFlag("pad"), {"pad": PADDING}),
    "longformer": (hm.recipes.longformer(2, "is_global"), {"is_global": FLAGS}),
    "too many flags": (hm.recipes.longformer(2, "is_global"), {"is_global": PADDING}),
    "flags and padding": (
        (hm.Window(2, 2) | hm.KeyFlag("is_global") | hm.QueryIn("ids", 1)) & hm.KeyFlag("pad"),
        {"is_global": FLAGS, "ids": UNSORTED_IDS // 2, "pad": PADDING},
    ),
    "flags both ways": (
        (hm.Window(2, 2) | hm.KeyFlag("is_global")) & (~hm.KeyFlag("is_global") | hm.Window(4, 0)),
        {"is_global": FLAGS},
    ),
    "ids and a sink": (hm.SameSegment("ids") | hm.Keys(0, 1), {"ids": UNSORTED_IDS}),
    "ids and padding": (
        hm.SameSegment("ids") & hm.KeyFlag("pad"),
        {"ids": SORTED_IDS, "pad": PADDING},
    ),
    "a whole mask": (hm.MaskInput("m"), {"m": _rng.random((3, 4, 23, 23)) < 0.3}),
    "a whole mask of one example": (hm.MaskInput("m"), {"m": _rng.random((1, 4, 23, 23)) < 0.3}),
    "one row of keys": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _rng.random((3, 1, 1, 23)) < 0.7, "ids": SORTED_IDS},
    ),
    "one column of queries": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _rng.random((3, 4, 23, 1)) < 0.5, "ids": SORTED_IDS},
    ),
    "heads in any order": (
        hm.PerHead({0: hm.Window(1, 1), 1: hm.MaskInput("m"), 2: hm.Window(1, 1), 3: hm.Chunk(5)}),
        {"m": _rng.random((1, 4, 23, 23)) < 0.3},
    ),
}
