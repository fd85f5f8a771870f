"""Checks for test suites: each raises an AssertionError that says what is wrong."""

from collections.abc import Mapping
from typing import Any

from keras_headmask.heads.leaks import find_leaks
from keras_headmask.rules import base, evaluation, examples, fields, spec_laws
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.heads import check_heads
from keras_headmask.rules.offsets import checked_offset
from keras_headmask.rules.words import enough_heads


def assert_no_leaks(
    model: Any, inputs: Any, rule: MaskSpec | None = None, tolerance: float = 1e-5
) -> None:
    """Fail if `hm.find_leaks` finds a leak, or can try no hidden pair at all.

    Args:
        model, ..., tolerance: As for `hm.find_leaks`.

    Raises:
        AssertionError: with the report as its text.
        TypeError, ValueError: as `hm.find_leaks`.

    >>> import keras, numpy as np
    >>> from keras_headmask import recipes
    >>> x = keras.Input((6, 4))
    >>> attention = keras.layers.MultiHeadAttention(2, 4)
    >>> model = keras.Model(x, attention(x, x, use_causal_mask=True))
    >>> assert_no_leaks(model, np.random.rand(2, 6, 4), rule=recipes.causal())
    """
    __tracebackhide__ = True
    report = find_leaks(model, inputs, rule, tolerance)
    if report or not report.tried:
        raise AssertionError(str(report))


def check_spec(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
) -> None:
    """Fail if attention under a spec of your own would be wrong.

    Each kind that `spec` is made of is tried: `allowed` for tiles of two sizes, and `coverage`,
    `constant`, `tiling.opens` and `looks_back`, against the whole mask; and `spec` must come back
    from its JSON, equal and with an equal hash. Give its fields values other than the defaults.

    Args:
        spec: A `MaskSpec`, of your own kind or made of some.
        queries: Number of queries; by default that of `mask_inputs`, or a length at which every
            number of the rule matters.
        keys: Number of keys; by default likewise.
        num_heads: Number of heads; by default one more than the rule names.
        mask_inputs: Examples of what it reads, as for `make_mask`: several runs of real values.
        query_offset: Query i stands at position i + `query_offset`.

    Raises:
        AssertionError: for the first law that is broken: at which tile, and what to do.
        TypeError: if `spec` is not a spec, or `allowed` returns something else than booleans.
        ValueError: if it reads a mask input that is missing, if lengths do not fit, or `allowed`
            returns another shape.

    >>> import numpy as np
    >>> from keras_headmask import SameSegment
    >>> check_spec(SameSegment("doc"), mask_inputs={"doc": np.array([[0, 0, 1, 1, 1, 2]])})
    """
    __tracebackhide__ = True
    base.check_spec(spec, "spec", "hm.testing.check_spec(SPEC)")
    offset = checked_offset(query_offset)
    distance = spec.sampling.distance
    enough = 256 if distance is None else min(max(3 * distance + 2, 32), 1024)
    of_queries, of_keys = (examples.length_of(spec, mask_inputs or {}, side) for side in (0, -1))
    for name, size in (("queries", queries), ("keys", keys)):
        if size is not None:
            fields.whole_number(size, name, at_least=1)
    queries = queries or of_queries or keys or of_keys or enough
    keys = keys or of_keys or queries
    num_heads = enough_heads(spec) if num_heads is None else num_heads
    check_heads(spec, num_heads)
    lengths = evaluation.Lengths(None, num_heads, queries, keys)
    called = "hm.testing.check_spec(spec, ...)"
    evaluation.check_inputs(spec, mask_inputs, lengths, offset, called)
    sides = {name: examples.sides_of(x) for name, x in (mask_inputs or {}).items()}
    if empty := [k for k, of in sides.items() if any(x is not None and not x.size for x in of)]:
        raise ValueError(f"`mask_inputs` must hold examples. Received: none in {empty}.")
    sizes = queries, keys, num_heads, mask_inputs or {}, offset
    broken = list(spec_laws.broken_in_json(spec))
    for leaf in base.leaves(spec):
        broken += spec_laws.broken_in_masks(leaf, *sizes)
    if broken:
        raise AssertionError(f"{broken[0].message} {broken[0].way_out}")
