"""How far back a rule looks: what a cache of keys must keep for later queries."""

import functools
import itertools
from collections.abc import Collection, Iterable
from typing import TypeAlias

from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.protocol import Reach
from keras_headmask.rules.words import enough_heads

_Ranges: TypeAlias = tuple[tuple[int, int], ...]


def reach(spec: MaskSpec, num_heads: int | None = None) -> Reach:
    """How far back a query may look under a rule, and at which fixed positions.

    In a causal decoder, a cache may drop every other key. The answer is a bound: the rule allows no
    key up to the query's own position outside of it, and perhaps not all inside. It is unbounded
    where ids, flags or whole masks alone decide, and where the rule leaves the side behind open.

    Args:
        spec: A `MaskSpec`. The answer holds for all of its heads; of one: `spec.for_head(3)`.
        num_heads: The number of heads. Without it, one head that no rule names counts, too.

    Returns:
        A `Reach`.

    Raises:
        TypeError: if `spec` is not a spec.
        ValueError: for a head that `spec` names and `num_heads` does not reach.

    >>> from keras_headmask import PerHead, SameSentence, Window, recipes
    >>> reach(recipes.streaming(sinks=4, window=256))
    Reach(before=255, fixed=((0, 4),))
    >>> reach(SameSentence(9) & Window(before=7, after=0))
    Reach(before=7, fixed=())
    >>> reach(recipes.causal()).is_bounded
    False
    >>> heads = PerHead({"0-2": Window(before=7, after=0)})
    >>> reach(heads, num_heads=4), reach(heads, num_heads=3)
    (Reach(before=None, fixed=()), Reach(before=7, fixed=()))
    """
    check_spec(spec, "spec", "hm.reach(SPEC)")
    heads = enough_heads(spec) if num_heads is None else num_heads
    return union(rule.looks_back() for rule, _ in head_groups(spec, heads))


def union(reaches: Iterable[Reach]) -> Reach:
    """A reach that holds the pairs of all `reaches`."""
    reaches = tuple(reaches)
    if not all(part.is_bounded for part in reaches):
        return Reach()
    farthest = max(part.before for part in reaches if part.before is not None)
    return Reach(farthest, tuple(itertools.chain.from_iterable(part.fixed for part in reaches)))


def intersection(reaches: Collection[Reach]) -> Reach:
    """A reach that holds each pair that lies in all of `reaches`.

    Take any distance: a pair farther apart lies in the fixed ranges of each reach that ends there
    or before. So each `before` gives a sound answer; the one of fewest keys is taken.
    """
    answers = []
    for before in sorted({part.before for part in reaches if part.before is not None}):
        ended = [p.fixed for p in reaches if p.before is not None and p.before <= before]
        answers.append(Reach(before, functools.reduce(_common, ended)))
    return min(answers, key=lambda answer: answer.most_keys or 0, default=Reach())


def _common(left: _Ranges, right: _Ranges) -> _Ranges:
    pairs = itertools.product(left, right)
    cuts = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return tuple((start, stop) for start, stop in cuts if start < stop)
