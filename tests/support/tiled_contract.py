"""What the tests of tiles share: tiny tiles, operands, and a call."""

import contextlib

import keras
import numpy as np
from contract import numpy
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.scopes import current_tuning, tuned

BACKEND = keras.backend.backend()
SCALE = 0.7
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


def close(got, wanted, message=""):
    got = got if isinstance(got, np.ndarray) else numpy(got)
    wanted = wanted if isinstance(wanted, np.ndarray) else numpy(wanted)
    assert_close(got, wanted, message=message, depth=3)
