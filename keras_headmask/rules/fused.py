"""Rules as what fused attention takes in place of a mask: a window, or ids that must be equal."""

import functools
import operator
from typing import NamedTuple

from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.inputs import SameSegment, SameSentence
from keras_headmask.rules.positions import Full, Window


class Fused(NamedTuple):
    """Arguments of `jax.nn.dot_product_attention` that say what a rule says."""

    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None


def lowered(rule: MaskSpec, queries: int, keys: int, query_offset: int = 0) -> Fused | None:
    """`rule`, free of `PerHead`, as arguments that cuDNN takes; `None` if it has none.

    It takes causal attention, with a window behind the query or without, of one sequence to
    itself, and attention to every key.
    """
    if rule.constant:
        return Fused()
    sides = window(rule)
    if sides is None or queries != keys or query_offset:
        return None
    before, after = sides
    if after != 0 or (before is not None and before < 0):
        return None
    return Fused(True, None if before is None or before >= queries - 1 else (before, 0))


def window(rule: MaskSpec) -> tuple[int | None, int | None] | None:
    """How far behind and ahead of a query `rule` reaches, if that is all that it says."""
    parts = _parts(rule)
    windows = [part for part in parts if type(part) is Window and part.step == 1]
    if len(windows) != len(parts):
        return None
    befores = [part.before for part in windows if part.before is not None]
    afters = [part.after for part in windows if part.after is not None]
    return min(befores, default=None), min(afters, default=None)


class Divided(NamedTuple):
    """A rule that allows what all of these allow.

    Args:
        positional: Reads no input.
        ids: Compares an id of the query with one of the key; `None` where nothing does.
        flags: Each asks something of the query alone, or of the key alone.
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
    sides = {leaf.opens for leaf in leaves(rule)}
    return sides.pop() if len(sides) == 1 else None


def _parts(rule: MaskSpec) -> tuple[MaskSpec, ...]:
    return rule.children if rule.kind == "and" else (rule,)
