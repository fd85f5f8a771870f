"""Checks for test suites: each raises an AssertionError that says what is wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_headmask.heads import changes, tested
from keras_headmask.heads.leaks import find_leaks
from keras_headmask.rules import base, evaluation, examples, fields, spec_laws
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.by_head import check_heads
from keras_headmask.rules.offsets import checked_offset
from keras_headmask.rules.words import enough_heads


def assert_no_leaks(
    what: Any,
    inputs: Any,
    rule: MaskSpec | None = None,
    real: Any = None,
    tolerance: float = 1e-5,
) -> None:
    """Fail if `hm.find_leaks` finds a leak, or can try no hidden pair at all.

    Args:
        what, ..., tolerance: As for `hm.find_leaks`.

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
    report = find_leaks(what, inputs, rule, real, tolerance)
    if report or not report.tried:
        raise AssertionError(str(report))


def assert_steps_equal(
    step: Callable,
    whole: Any,
    inputs: Any,
    prompt: int = 1,
    state: Any = None,
    tolerance: float = 1e-4,
) -> None:
    """Fail if a decoder that reads its inputs step by step differs from its whole forward.

    Args:
        step: A function of the inputs at some positions and of a state, such as a cache of keys
            and values. It returns the outputs at these positions, and the next state:
            `outputs, state = step(inputs, state)`.
        whole: A Keras model or a function of the whole inputs. It returns the outputs at all
            positions, `(batch, length, ...)`, by the names of those of `step` if there are several.
        inputs: Arrays `(batch, length, ...)`, in a dict or list where there are several; a step
            gets a slice of each.
        prompt: How many positions the first step reads; each later step reads one.
        state: The state of the first step.
        tolerance: Relative, as for `hm.find_leaks`: other kernels round in another order.

    Raises:
        AssertionError: for the first step that differs: where, and by how much; or if all outputs
            are NaN, which proves nothing.
        TypeError: if `step` does not return a pair, or nothing returns numbers.
        ValueError: for inputs of several lengths, no step after the prompt, or outputs of other
            names or shapes.

    >>> def step(x, total):
    ...     sums = total + np.cumsum(x, axis=1)
    ...     return sums, sums[:, -1:]
    >>> x = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> assert_steps_equal(step, lambda x: np.cumsum(x, axis=1), x, state=0.0)
    """
    __tracebackhide__ = True
    tolerance = fields.not_negative(tolerance, "tolerance")
    model, arrays = tested.as_tested(whole, inputs)
    lengths = {x.shape[1] for x in arrays.values() if x.ndim > 1}
    fields.whole_number(prompt, "prompt", at_least=1)
    if len(lengths) != 1 or prompt >= max(lengths):
        raise ValueError(
            "`inputs` must have one length, of more positions than `prompt`. Received: lengths "
            f"{sorted(lengths)}, and a prompt of {prompt}."
        )
    (length,) = lengths
    expected = model.run(arrays).outputs
    if all(np.isnan(x).all() for x in expected.values()):
        raise AssertionError("All outputs of the whole forward are NaN, so nothing is proven.")
    for stop in range(prompt, length + 1):
        start = stop - 1 if stop > prompt else 0
        part = {name: x[:, start:stop] if x.ndim > 1 else x for name, x in arrays.items()}
        pair = tested.called(step, inputs, part, state)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                "`step` must return a pair, its outputs and the next state. Received: "
                f"{type(pair).__name__}."
            )
        outputs, state = tested.numbers_of(pair[0], "`step`")[0], pair[1]
        rows = {k: x[:, start:stop] for k, x in expected.items() if k in outputs and x.ndim > 1}
        if {k: x.shape for k, x in outputs.items()} != {k: x.shape for k, x in rows.items()}:
            raise ValueError(
                "`step` must return outputs by the names of those of `whole`, of the shape "
                f"(batch, positions, ...). Received: {tested.shapes(outputs)} for "
                f"{stop - start} positions of {tested.shapes(expected)}."
            )
        for name, x in outputs.items():
            limit = tolerance * changes.scales(expected[name], True)[:, start:stop]
            moved = changes.difference(rows[name], x, True, limit)
            if moved.any():
                example, row = np.unravel_index(moved.argmax(), moved.shape)
                raise AssertionError(
                    f"The step on positions {start} to {stop - 1} differs from the whole forward: "
                    f"by {moved.max():.2g} in the output {name!r} of example {example} at position "
                    f"{start + row}."
                )


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
    `constant` and `tiling.opens`, against the whole mask; and `spec` must come back from its JSON,
    equal and with an equal hash. Give its fields values other than the defaults.

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
