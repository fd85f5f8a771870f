"""Checks for test suites: each raises an AssertionError that says what is wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_headmask.heads import changes
from keras_headmask.heads.leaks import find_leaks
from keras_headmask.heads.tested import Tested, numbers_of, shapes
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
        step: `outputs, state = step(inputs, state)`, a function of the inputs at some positions
            and of a state, such as a cache of keys and values.
        whole: A Keras model or a function of the whole inputs. It returns the outputs at all
            positions, `(batch, length, ...)`, by the names of those of `step` if there are several.
        inputs: Arrays `(batch, length, ...)`, in a dict or list where there are several. Functions
            get NumPy arrays; a step gets a slice of each.
        prompt: How many positions the first step reads; each later step reads one.
        state: The state of the first step.
        tolerance: Relative, as for `hm.find_leaks`: other kernels round in another order.

    Raises:
        AssertionError: for the first step that differs, or if all outputs are NaN.
        TypeError, ValueError: for what is no such step, or no step after the prompt.

    >>> def step(x, total):
    ...     sums = total + np.cumsum(x, axis=1)
    ...     return sums, sums[:, -1:]
    >>> x = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> assert_steps_equal(step, lambda x: np.cumsum(x, axis=1), x, state=0.0)
    """
    __tracebackhide__ = True
    tolerance = fields.not_negative(tolerance, "tolerance")
    tested = Tested(whole, inputs)
    lengths = {x.shape[1] for x in tested.arrays.values() if x.ndim > 1}
    fields.whole_number(prompt, "prompt", at_least=1)
    if len(lengths) != 1 or prompt >= max(lengths):
        raise ValueError(
            "`inputs` must have one length, of more positions than `prompt`. Received: lengths "
            f"{sorted(lengths)}, and a prompt of {prompt}."
        )
    (length,) = lengths
    expected, _ = tested.run(tested.arrays)
    if all(np.isnan(x).all() for x in expected.values()):
        raise AssertionError("All outputs of the whole forward are NaN, so nothing is proven.")
    for stop in range(prompt, length + 1):
        start = stop - 1 if stop > prompt else 0
        part = {k: x[:, start:stop] if x.ndim > 1 else x for k, x in tested.arrays.items()}
        pair = step(tested.packed(part), state)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                "`step` must return a pair, its outputs and the next state. Received: "
                f"{type(pair).__name__}."
            )
        outputs, state = numbers_of(pair[0], "`step`")[0], pair[1]
        rows = {k: x[:, start:stop] for k, x in expected.items() if k in outputs and x.ndim > 1}
        if {k: x.shape for k, x in outputs.items()} != {k: x.shape for k, x in rows.items()}:
            raise ValueError(
                "`step` must return outputs by the names of those of `whole`, of the shape "
                f"(batch, positions, ...). Received: {shapes(outputs)} for "
                f"{stop - start} positions of {shapes(expected)}."
            )
        for name, x in outputs.items():
            every = expected[name].reshape((*expected[name].shape[:2], -1))
            limit = tolerance * changes.scales(every)[:, start:stop]
            moved = changes.difference(every[:, start:stop], x.reshape(limit.shape), limit)
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
        queries, keys: How many; by default as many as `mask_inputs` have, or a length at which
            every number of the rule matters.
        num_heads: Number of heads; by default one more than the rule names.
        mask_inputs: Examples of what it reads, as for `make_mask`: several runs of real values.
        query_offset: Query i stands at position i + `query_offset`.

    Raises:
        AssertionError: for the first law that is broken: at which tile, and what to do.
        TypeError, ValueError: as `make_mask` does.

    >>> import numpy as np
    >>> from keras_headmask import SameSegment
    >>> check_spec(SameSegment("doc"), mask_inputs={"doc": np.array([[0, 0, 1, 1, 1, 2]])})
    """
    __tracebackhide__ = True
    base.check_spec(spec, "spec", "hm.testing.check_spec(SPEC)")
    offset, mask_inputs = checked_offset(query_offset), mask_inputs or {}
    distance = spec.sampling.distance
    enough = 256 if distance is None else min(max(3 * distance + 2, 32), 1024)
    of_queries, of_keys = (examples.length_of(spec, mask_inputs, side) for side in (0, -1))
    for name, size in (("queries", queries), ("keys", keys)):
        if size is not None:
            fields.whole_number(size, name, at_least=1)
    queries = queries or of_queries or keys or of_keys or enough
    keys = keys or of_keys or queries
    num_heads = enough_heads(spec) if num_heads is None else num_heads
    check_heads(spec, num_heads)
    lengths = evaluation.Lengths(None, num_heads, queries, keys)
    evaluation.check_inputs(spec, mask_inputs, lengths, offset, "hm.testing.check_spec(spec, ...)")
    sides = {name: examples.sides_of(x) for name, x in mask_inputs.items()}
    if empty := [k for k, of in sides.items() if any(x is not None and not x.size for x in of)]:
        raise ValueError(f"`mask_inputs` must hold examples. Received: none in {empty}.")
    broken = list(spec_laws.broken_in_json(spec))
    for leaf in base.leaves(spec):
        broken += spec_laws.broken_in_masks(leaf, queries, keys, num_heads, mask_inputs, offset)
    if broken:
        raise AssertionError(f"{broken[0].message} {broken[0].way_out}")
