"""Checks for test suites: each raises an AssertionError that says what is wrong."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_headmask.attention.planner import NUMPY, bounds_of
from keras_headmask.heads import leaks
from keras_headmask.rules import base, evaluation
from keras_headmask.rules.algebra import farthest
from keras_headmask.rules.base import MaskSpec, check_heads, enough_heads
from keras_headmask.rules.evaluation import Bound, checked_offset, length_of
from keras_headmask.rules.protocol import Places, Sides


def assert_no_leaks(
    what: Any, inputs: Any, rule: MaskSpec | None = None, real: Any = None, tolerance: float = 1e-5
) -> None:
    """Fail if `hm.find_leaks` finds a leak, or can try no hidden pair at all.

    Args:
        what, ..., tolerance: As for `hm.find_leaks`.

    Raises:
        AssertionError: with the report as its text.
    """
    __tracebackhide__ = True
    report = leaks.find_leaks(what, inputs, rule, real, tolerance)
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
        TypeError, ValueError: for another kind of step, or none after the prompt.

    >>> def step(x, total):
    ...     sums = total + np.cumsum(x, axis=1)
    ...     return sums, sums[:, -1:]
    >>> x = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> assert_steps_equal(step, lambda x: np.cumsum(x, axis=1), x, state=0.0)
    """
    __tracebackhide__ = True
    tolerance = base.not_negative(tolerance, "tolerance")
    base.whole_number(prompt, "prompt", at_least=1)
    arrays = leaks.arrays_of(whole, inputs)
    lengths = {x.shape[1] for x in arrays.values() if x.ndim > 1}
    if len(lengths) != 1 or prompt >= max(lengths):
        raise ValueError(
            "`inputs` must have one length, of more positions than `prompt`. Received: lengths "
            f"{sorted(lengths)}, and a prompt of {prompt}."
        )
    expected = {k: x for k, x in leaks.run(whole, inputs, arrays).items() if x.ndim > 1}
    if all(np.isnan(x).all() for x in expected.values()):
        raise AssertionError("All outputs of the whole forward are NaN, so nothing is proven.")
    for stop in range(prompt, max(lengths) + 1):
        start = stop - 1 if stop > prompt else 0
        part = {k: x[:, start:stop] if x.ndim > 1 else x for k, x in arrays.items()}
        found, state = step(leaks.packed(part, inputs), state)
        outputs = leaks.numbers_of(found, "`step`")
        for name, x in outputs.items():
            every = expected.get(name, np.zeros((0, 0)))
            if x.shape != every[:, start:stop].shape:
                raise ValueError(
                    "`step` must return a pair of its outputs, by the names of those of `whole`, "
                    f"(batch, positions, ...), and a state. Received: {leaks.shapes(outputs)} for "
                    f"{stop - start} positions of {leaks.shapes(expected)}."
                )
            every = every.reshape((*every.shape[:2], -1))
            limit = tolerance * leaks.scales(every)[:, start:stop]
            moved = leaks.difference(every[:, start:stop], x.reshape(limit.shape), limit)
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

    Each kind that it is made of is tried: `allowed` for a few tiles at once, and `coverage`,
    against the whole mask. And `spec` must come back from its JSON, equal and with an equal hash.
    Give its fields values other than the defaults.

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

    >>> from keras_headmask import SameSegment
    >>> check_spec(SameSegment("doc"), mask_inputs={"doc": np.array([[0, 0, 1, 1, 1, 2]])})
    """
    __tracebackhide__ = True
    base.check_spec(spec, "spec", "hm.testing.check_spec(SPEC)")
    offset, mask_inputs = checked_offset(query_offset), mask_inputs or {}
    enough = min(max(3 * (farthest(spec) or 0) + 2, 256), 1024)
    of_queries, of_keys = (length_of(spec, mask_inputs, side) for side in (0, -1))
    queries = queries if queries is not None else of_queries or keys or of_keys or enough
    keys = keys if keys is not None else of_keys or queries
    heads = enough_heads(spec) if num_heads is None else num_heads
    check_heads(spec, heads)
    lengths = evaluation.Lengths(None, heads, queries, keys)
    evaluation.check_inputs(spec, mask_inputs, lengths, offset, "hm.testing.check_spec(spec, ...)")
    try:
        broken = next(_broken(spec, mask_inputs, lengths, offset), "")
    except Exception as error:  # of the kind's own code
        broken = f"{spec!r} fails where attention asks for tiles, or its JSON: {error}"
    if broken:
        raise AssertionError(broken)


def _broken(spec: MaskSpec, mask_inputs: Any, lengths: Any, offset: Any) -> Iterator[str]:
    """What is wrong with a spec, and what to do."""
    again = MaskSpec.from_config(json.loads(json.dumps(spec.get_config())))
    if again != spec or hash(again) != hash(spec):
        yield (
            f"{spec!r}, saved as JSON and loaded, comes back as {again!r}, which must be equal, of "
            "an equal hash: `get_config` must hold every field, and `from_fields` read it."
        )
    _, heads, queries, keys = lengths
    for leaf in base.leaves(spec):
        bound, name = evaluation.bind(leaf, mask_inputs, queries, keys, offset), type(leaf).__name__
        whole = ops.convert_to_numpy(evaluation.mask_of_heads(leaf, bound, tuple(range(heads))))
        whole = np.broadcast_to(whole, (*whole.shape[:2], queries, keys))
        if not whole.size:
            yield f"There must be examples, queries and keys. Received: a mask of {whole.shape}."
        for problem in _broken_tiles(leaf, bound, whole, heads):
            yield (
                f"`{name}.allowed` is not element-wise: {problem}, but not in the whole mask. Each "
                "pair must follow from its positions and inputs alone: nothing counts from the "
                "corner of a tile, as `np.tril` does. What needs whole sequences belongs in "
                "`prepare`."
            )
        for problem in _broken_coverage(leaf, bound, whole, offset):
            yield (
                f"`{name}.coverage` {problem}. `possible` must be True where any pair is allowed, "
                "`certain` only where every one is. In doubt, say True and False."
            )


def _broken_tiles(leaf: MaskSpec, bound: Bound, whole: np.ndarray, heads: int) -> Iterator[str]:
    """Ask for 1 to 3 tiles at once, of any queries and keys, as attention does."""
    rng, take = np.random.default_rng(0), functools.partial(ops.take, axis=0)
    batch, _, queries, keys = whole.shape
    for count in (3, 2, 1) * 5:
        tile = rng.integers(1, 6), rng.integers(1, 8)
        example = rng.integers(0, batch, (count, 1, 1, 1), "int32")
        row = rng.integers(0, queries, (count, 1, tile[0], 1), "int32")
        column = rng.integers(0, keys, (count, 1, 1, tile[1]), "int32")
        places = example, row, column, example * queries + row, example * keys + column
        at = Places(*(*map(ops.convert_to_tensor, places), take))
        answer = ops.convert_to_numpy(evaluation.mask_at(leaf, bound, tuple(range(heads)), at))
        expected = whole[example, :, row, column][:, 0].transpose(0, 3, 1, 2)
        for n, head, i, j in np.argwhere(np.broadcast_to(answer != expected, expected.shape)):
            says = "forbids" if expected[n, head, i, j] else "allows"
            pair = f"query {row[n, 0, i, 0]} to see key {column[n, 0, 0, j]}"
            yield f"in a tile of {tile[0]} queries and {tile[1]} keys it {says} {pair}"


def _broken_coverage(leaf: MaskSpec, bound: Bound, whole: np.ndarray, offset: Any) -> Iterator[str]:
    """Compare the bounds that attention reads with what each tile holds, for several sizes."""

    def in_numpy(value: Any) -> Any:  # a whole mask as it is, since `coverage` does not read it
        if not isinstance(value, Sides):
            return value
        return Sides(*(x if x is None else ops.convert_to_numpy(x) for x in value))

    queries, keys = whole.shape[2:]
    inputs = bound.changed(in_numpy).leaf_inputs
    for size in ((1, 1), (5, 7), (-(-queries // 4), -(-keys // 3))):
        possible, certain = bounds_of(leaf, inputs, (queries, keys), size, offset, NUMPY)
        rows, columns = np.arange(0, queries, size[0]), np.arange(0, keys, size[1])
        every, some = (
            of.reduceat(of.reduceat(whole, rows, axis=2), columns, axis=3)
            for of in (np.logical_and, np.logical_or)
        )
        for claim, wrong in {
            "no pair": some.any(1) & ~possible,
            "every pair": certain & ~every.all(1),
        }.items():
            for *_, i, j in np.argwhere(wrong):
                tile = f"{size[0]} queries from {rows[i]} and {size[1]} keys from {columns[j]}"
                yield f"wrongly says that {claim} of {tile} is allowed"
