"""A rule in parts: what it says of positions, of ids that must be equal, of flags."""

import functools
import operator
from typing import NamedTuple

from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.inputs import SameSegment, SameSentence
from keras_headmask.rules.positions import Full


class Divided(NamedTuple):
    """A rule that allows what all of these allow.

    Args:
        positional: Reads no input.
        ids: Compares an id of the query with one of the key; `None` where nothing does.
        flags: Each is a condition on the query alone, or on the key alone.
    """

    positional: MaskSpec
    ids: MaskSpec | None
    flags: frozenset[MaskSpec]


def divided(rule: MaskSpec) -> Divided | None:
    """`rule`, free of `PerHead`, in these parts; `None` if it has others, or compares two ids."""
    parts = _parts(rule)
    ids = [part for part in parts if type(part) in (SameSegment, SameSentence)]
    flags = [part for part in parts if flagged_side(part) is not None]
    positional = [part for part in parts if not part.inputs]
    if len(ids) > 1 or len(ids) + len(flags) + len(positional) != len(parts):
        return None
    joined = functools.reduce(operator.and_, positional) if positional else Full()
    return Divided(joined, ids[0] if ids else None, frozenset(flags))


def flagged_side(rule: MaskSpec) -> str | None:
    """The side, "query" or "key", of which `rule` reads flags and nothing else; `None` if none."""
    sides = {leaf.tiling.opens for leaf in leaves(rule)}
    return sides.pop() if len(sides) == 1 else None


def _parts(rule: MaskSpec) -> tuple[MaskSpec, ...]:
    return rule.children if rule.kind == "and" else (rule,)
