"""Random rules, and the random mask inputs that they read."""

import keras
import numpy as np
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st

import keras_headmask as hm
from keras_headmask.rules import base

_QUICK = {"deadline": None, "database": None, "phases": set(Phase) - {Phase.explain}}
# JAX compiles each example anew, TensorFlow runs many small operations; the law is the same on
# every backend.
_EXAMPLES = {"jax": (5, 10), "tensorflow": (10, 80)}.get(keras.backend.backend(), (20, 80))
FEW, MANY = (settings(max_examples=count, **_QUICK) for count in _EXAMPLES)

NUM_HEADS = 3
# Few sizes, since JAX compiles for each: equally long, more keys, more queries.
LENGTHS = ((5, 5), (4, 7), (6, 3))
LOWEST_ID, HIGHEST_ID = -1, 3

ids = st.integers(LOWEST_ID, HIGHEST_ID)
id_sets = st.sets(ids, min_size=1, max_size=3).map(tuple)


@st.composite
def windows(draw):
    low, high = sorted([draw(st.integers(-4, 4)), draw(st.integers(-4, 4))])
    before = draw(st.sampled_from([None, -low]))
    after = draw(st.sampled_from([None, high]))
    step = draw(st.integers(1, 3))
    if before is not None and after is not None:  # a multiple of `step` must lie in the window
        assume(any(distance % step == 0 for distance in range(-before, after + 1)))
    return hm.Window(before, after, step=step)


@st.composite
def ranges(draw, kind):
    start = draw(st.integers(0, 5))
    return kind(start, draw(st.none() | st.integers(start + 1, 7)))


positional_leaves = st.one_of(
    windows(),
    st.just(hm.Full()),
    st.just(hm.Nothing()),
    st.builds(hm.Chunk, st.integers(1, 4), st.integers(0, 1), st.integers(0, 1)),
    ranges(hm.Keys),
    ranges(hm.Queries),
)
reading_leaves = st.one_of(
    st.just(hm.SameSegment("ids")),
    st.builds(hm.SameSentence, id_sets, st.just("ids")),
    st.builds(hm.KeyFlag, st.sampled_from(["flags", "ids"])),
    st.builds(hm.QueryFlag, st.sampled_from(["flags", "ids"])),
    st.builds(hm.KeyIn, st.just("ids"), id_sets),
    st.builds(hm.QueryIn, st.just("ids"), id_sets),
    st.just(hm.MaskInput("whole")),
)
leaves = positional_leaves | reading_leaves


def _compounds(parts):
    joins = st.one_of(
        st.builds(lambda a, b: a & b, parts, parts),
        st.builds(lambda a, b: a | b, parts, parts),
        st.builds(lambda a: ~a, parts),
    )
    heads = st.dictionaries(st.integers(0, NUM_HEADS - 1), parts, max_size=NUM_HEADS)
    return joins | st.builds(per_head_of, heads, parts)


def per_head_of(heads, default):
    """A `PerHead` of the parts that may be nested at these heads."""
    kept = {}
    for head, rule in heads.items():
        try:
            hm.PerHead({head: rule})
        except ValueError as error:
            if "must name a head that it is given to" not in str(error):
                raise
        else:
            kept[head] = rule
    return hm.PerHead(kept, default)


def specs(leaves=leaves):
    """Random rules over `leaves`, for `NUM_HEADS` heads at least."""
    return st.recursive(leaves, _compounds, max_leaves=6)


any_specs = specs()


def arrays(elements, shape, dtype):
    size = int(np.prod(shape))
    flat = st.lists(elements, min_size=size, max_size=size)
    return flat.map(lambda values: np.array(values, dtype).reshape(shape))


@st.composite
def mask_inputs(draw, spec, batch, queries, keys, heads=NUM_HEADS, single=False):
    """The inputs `spec` reads: `(query_side, key_side)` pairs, or a tensor as long as the keys."""
    given = {}
    for name, kind in spec.inputs.items():
        if kind.rank is None:
            shape = draw(
                st.sampled_from(
                    [
                        (queries, keys),
                        (batch, queries, keys),
                        (batch, heads, queries, keys),
                        (1, heads, queries, keys),
                        (batch, 1, 1, keys),
                    ]
                )
            )
            given[name] = draw(
                arrays(st.booleans(), shape, draw(st.sampled_from(["bool", "int32"])))
            )
            continue
        elements, dtype = (st.booleans(), "bool") if name == "flags" else (ids, "int32")
        pair = tuple(draw(arrays(elements, (batch, n), dtype)) for n in (queries, keys))
        given[name] = pair[1] if single else pair
    return given


def offsets_of_pairs(spec):
    """0 for a rule that counts: it cannot know whether a pair has lost its start."""
    counts = any(leaf.counts for leaf in base.leaves(spec))
    return st.just(0) if counts else st.integers(-3, 4)


@st.composite
def cases(draw, specs=any_specs):
    """`(spec, inputs, batch, heads, queries, keys, query_offset)` that fit one another."""
    spec = draw(specs)
    batch, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([NUM_HEADS, NUM_HEADS + 1]))
    queries, keys = draw(st.sampled_from(LENGTHS))
    # A single tensor serves both sides where each query's position is some key's; an offset of 0
    # with lengths that differ is taken for a mistake.
    single = draw(st.booleans()) and queries <= keys
    if single:
        offset = draw(st.integers(1, keys - queries)) if queries < keys else 0
    else:
        offset = draw(offsets_of_pairs(spec))
    inputs = draw(mask_inputs(spec, batch, queries, keys, heads, single))
    return spec, inputs, batch, heads, queries, keys, offset
