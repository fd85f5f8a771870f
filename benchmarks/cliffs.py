"""`python -m benchmarks.cliffs`: where a rule takes longer than all logits without skipping.

Walks a grid of rules x lengths x heads x batch x (forward, gradient) x (lengths known, unknown) on
TensorFlow. Prints each case that takes more than 1.1 of the time of the dense implementation
(`tiled=False`) in the same process, and each that takes more than 10 s to compile; then a summary.
With `--against stock` Keras' own attention takes its place, fed the finished mask: that is harder
for a rule whose mask takes long to make (and leaves out dropout, which Keras' own has not).
Both run in turns, and what counts is the ratio of two runs side by side, so that a busy moment
meets both. A ratio is printed only where a sign test of all of them says that their median is
above the limit. The exit status is 1 if there is such a case.

`TF_ENABLE_ONEDNN_OPTS=1` before it measures with oneDNN, `=0` without.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.cliff_cases import Case, grid

LIMIT = 1.1
AGAINST = ("dense", "stock")
MOST_SECONDS_TO_COMPILE = 10.0  # of processor time, which neighbours do not lengthen
SLOWER, NOT_SLOWER, UNDECIDED = "slower", "not slower", "undecided"
_FIRST, _MORE = 5, 6  # pairs of runs: of each case, and at a time where those decide nothing
_LEAST_SECONDS = 0.003  # of a run; a shorter call is repeated within it


class Found(NamedTuple):
    """Of one case: the ratios of ours over dense, and what they say of their median."""

    ratios: list[float]
    milliseconds: float  # of one call of the other
    verdict: str

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few tiny cases: does it run?")
    add("--only", default="", metavar="SUBSTRING", help="cases whose name holds it")
    add("--repetitions", type=int, default=35, help="most pairs of runs of a case; 35 by default")
    add("--limit", type=float, default=LIMIT, help="of ours over dense; 1.1 by default")
    add("--against", choices=AGAINST, default="dense", help="dense by default")
    add("--all", action="store_true", help="print every case")
    options = parser.parse_args(arguments)
    cases = [case for case in grid(options.quick) if options.only in str(case)]
    cases = [case for case in cases if options.against == "dense" or not case.dropout]
    if not cases:
        raise SystemExit(f"No case has {options.only!r} in its name. `--all` prints the names.")
    start = time.perf_counter()
    verdicts: list[str] = []
    compiled_slowly = 0
    for case, calls, compiled_in in compiled(cases, options.against):
        found = compare(*calls, options.repetitions, options.limit)
        verdicts.append(found.verdict)
        if found.verdict == SLOWER or options.all:
            other = f"{options.against}: {found.milliseconds:.2f} ms"
            print(f"{found.ratio:.2f} {case} ({other})", flush=True)
        if compiled_in > MOST_SECONDS_TO_COMPILE:
            compiled_slowly += 1
            print(f"{compiled_in:.0f} s to compile {case}", flush=True)
    slower, undecided = verdicts.count(SLOWER), verdicts.count(UNDECIDED)
    print(
        f"{len(verdicts)} cases: {slower} slower than {options.limit:g} of "
        f"{options.against} ({undecided} too close to it to say), {compiled_slowly} compiled for "
        f"more than {MOST_SECONDS_TO_COMPILE:g} s; {time.perf_counter() - start:.0f} s in all."
    )
    return int(slower + compiled_slowly > 0)


# --- Measuring -----------------------------------------------------------------------------------


def compare(
    ours: Callable[[], Any],
    other: Callable[[], Any],
    most: int,
    limit: float = LIMIT,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Call both in turns until it is clear on which side of `limit` the median ratio is."""
    once = min(_seconds(other, 1, clock) for _ in range(2))
    _seconds(ours, 1, clock)
    calls = min(100, math.ceil(_LEAST_SECONDS / max(once, 1e-9)))
    ratios: list[float] = []
    while len(ratios) < most:
        for _ in range(min(_MORE if ratios else _FIRST, most - len(ratios))):
            pair = (ours, other) if len(ratios) % 2 else (other, ours)
            taken = {function: _seconds(function, calls, clock) for function in pair}
            ratios.append(taken[ours] / taken[other])
        if side_of(limit, ratios) != UNDECIDED:
            break
    return Found(ratios, 1000 * once, side_of(limit, ratios))


def side_of(limit: float, ratios: list[float]) -> str:
    """Whether the median is above `limit`, by a sign test.

    Of a median at the limit, "slower" comes from 1 in 200 such tests, "not slower" from 1 in 30:
    what is near the limit is measured again, and what is far below it costs five pairs of runs.
    """
    count, above = len(ratios), sum(ratio > limit for ratio in ratios)
    if _at_least(above, count) < 1 / 200:
        return SLOWER
    return NOT_SLOWER if _at_least(count - above, count) < 1 / 30 else UNDECIDED


def _at_least(heads: int, tosses: int) -> float:
    """The probability of so many heads or more."""
    return sum(math.comb(tosses, k) for k in range(heads, tosses + 1)) / 2**tosses


def _seconds(function: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


# --- TensorFlow ----------------------------------------------------------------------------------


def compiled(
    cases: Iterable[Case], against: str = "dense"
) -> Iterable[tuple[Case, tuple[Callable, Callable], float]]:
    """Of each case: calls of ours and of the other, and the seconds to compile ours.

    Those are of the processor, and 0 where it was compiled for a case before.
    """
    import tensorflow as tf

    import keras_headmask as hm

    before: tuple = ()
    for case in cases:
        *operands, upstream = (tf.constant(x) for x in case.operands())
        inputs = {name: tf.constant(array) for name, array in case.data().items()}
        offset = case.keys - case.queries
        last = (tf.constant(offset), *([upstream] if case.step == "gradient" else []))
        if is_new := case.compiled_as != before:
            functions = _function(case, "ours"), _function(case, against)
            before = case.compiled_as
        given = of_other = (*operands, inputs, *last)
        if against == "stock":
            lengths = case.queries, case.keys
            mask = hm.make_mask(case.spec(), *lengths, case.heads, inputs or None, offset)
            shape = case.batch, case.heads, *lengths
            of_other = (*operands, {"mask": tf.broadcast_to(mask, shape)}, *last)
        calls = _waiting(functions[0], given), _waiting(functions[1], of_other)
        yield case, calls, _seconds(calls[0], 1, time.process_time) if is_new else 0.0


def _waiting(function: Callable, given: tuple) -> Callable[[], Any]:
    """(An accelerator would return before it is done.)"""
    return lambda: [x.numpy() for x in function(*given)[-1:]]


def _function(case: Case, arm: str) -> Callable:
    """The context, or the gradients of queries, keys and values, of what `case` says."""
    import keras
    import tensorflow as tf

    import keras_headmask as hm

    # (An int would be a constant of the graph, whose numbers TensorFlow draws once for all calls.)
    seed = keras.random.SeedGenerator(1)
    spec, is_known = case.spec(), case.lengths == "known"
    batch, keys = (case.batch, case.keys) if is_known else (None, None)
    queries = case.queries if is_known or case.queries == 1 else None
    of_queries, of_keys = (
        tf.TensorSpec((batch, length, case.heads, case.size)) for length in (queries, keys)
    )
    of_inputs = {
        name: tf.TensorSpec((batch, keys), array.dtype) for name, array in case.data().items()
    }
    if arm == "stock":
        of_inputs = {"mask": tf.TensorSpec((batch, case.heads, queries, keys), "bool")}
    signature = [of_queries, of_keys, of_keys, of_inputs, tf.TensorSpec((), "int32")]

    def attend(query: Any, key: Any, value: Any, inputs: Any, offset: Any) -> tuple:
        if arm == "stock":
            return (keras.ops.dot_product_attention(query, key, value, mask=inputs["mask"]),)
        offset = (case.keys - case.queries) if is_known else offset
        context = hm.dot_product_attention(
            query,
            key,
            value,
            mask_spec=spec,
            mask_inputs=inputs or None,
            query_offset=offset if case.queries == 1 else 0,
            dropout=case.dropout,
            seed=seed,
            tiled=False if arm == "dense" else None,
        )
        return (context,)

    def gradients(query: Any, key: Any, value: Any, inputs: Any, offset: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            (context,) = attend(query, key, value, inputs, offset)
        # (With the context, which training computes, too.)
        return context, *tape.gradient(context, (query, key, value), output_gradients=upstream)

    if case.step == "gradient":
        signature.append(of_queries)
        return tf.function(gradients, input_signature=signature, autograph=False)
    return tf.function(attend, input_signature=signature, autograph=False)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    sys.exit(main())
