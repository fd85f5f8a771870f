"""Checks of the masks that a rule makes, in NumPy."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from keras import ops

from keras_headmask.rules import by_head, evaluation, words
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.examples import key_side

_SHORTEST, _UNKNOWN = 16, 256  # positions at which a rule is looked at
MOST_UNKNOWN, _MOST_PAIRS = 6, 2**26
_AT = "at {} x {} positions"

Arrays: TypeAlias = Mapping[str, Any]  # by name


class Finding(NamedTuple):
    """One thing that is likely wrong with a rule. It prints in a line.

    Args:
        code: A permanent name of what was found.
        message: What was found, at which lengths, and what to do.
        heads: The heads it speaks of.
        layers: The paths of the attention layers, where a model was looked at.
    """

    code: str
    message: str
    heads: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        heads = f", {words.heads_in_words(self.heads).lower()}" if self.heads else ""
        more = f" and {len(self.layers) - 3} more layers" if len(self.layers) > 3 else ""
        layers = f" In {', '.join(self.layers[:3])}{more}." if self.layers else ""
        return words.in_one_line(f"{self.code}{heads}: {self.message}{layers}")


def unknown_leaves(spec: MaskSpec, given: Arrays) -> list[MaskSpec]:
    """The leaves that read what is not given."""
    return [leaf for leaf in leaves(spec) if not leaf.inputs.keys() <= given.keys()]


def length_for(spec: MaskSpec, num_heads: int) -> tuple[int, bool]:
    """A length at which every number of the rule matters, and whether it is not too long."""
    distance = spec.sampling.distance
    wanted = _UNKNOWN if distance is None else max(_SHORTEST, 2 * distance + 2)
    unknown = min(len(unknown_leaves(spec, {})), MOST_UNKNOWN)
    most = math.isqrt(_MOST_PAIRS // (num_heads << unknown))
    return min(wanted, most), wanted <= most


def masks(spec: MaskSpec, num_heads: int, queries: int, keys: int, given: Arrays) -> np.ndarray:
    """What `spec` allows, `(2, ..., 2, B, H, queries, keys)`.

    A leaf whose inputs are not given may allow anything: it has an axis of 2, true and false.
    """
    unknown, pairs = unknown_leaves(spec, given), num_heads * queries * keys
    if len(unknown) > MOST_UNKNOWN or pairs << len(unknown) > _MOST_PAIRS:
        raise ValueError(
            f"{pairs} pairs of positions, and {len(unknown)} parts of the rule that read what is "
            "not given, are too many. Pass fewer `queries`, or `mask_inputs` beside a spec."
        )
    values: dict[MaskSpec, np.ndarray] = {}
    for leaf in leaves(spec):
        if leaf in unknown:
            axes = [2 if other == leaf else 1 for other in unknown]
            values[leaf] = np.reshape([True, False], (*axes, 1, 1, 1, 1))
        else:
            read = {name: given[name] for name in leaf.inputs}
            mask = evaluation.make_mask(leaf, queries, keys, num_heads, read)
            values[leaf] = ops.convert_to_numpy(mask)
    batch = max(value.shape[-4] for value in values.values())
    result = np.zeros((2,) * len(unknown) + (batch, num_heads, queries, keys), bool)
    for rule, heads in by_head.head_groups(spec, num_heads):
        some = (..., list(heads), slice(None), slice(None))
        own = {leaf: x if x.shape[-3] == 1 else x[some] for leaf, x in values.items()}
        result[some] = rule.fold(own.__getitem__, np.logical_and, np.logical_or, np.logical_not)
    return result


def of_rule(spec: MaskSpec, allowed: np.ndarray) -> Iterator[Finding]:
    """Rules that hide nothing, heads that are equal, inputs without effect.

    `allowed`: the `masks` without inputs, so that what is found holds whatever they hold.
    """
    at, of_heads = _AT.format(*allowed.shape[-2:]), np.moveaxis(allowed, -3, 0)
    groups = by_head.head_groups(spec, len(of_heads))
    for rule, heads in groups:
        if of_heads[heads[0]].all() and (rule.children or not rule.constant):
            yield Finding("hides-nothing", f"{rule!r} hides nothing {at}.", heads)
    for (one, heads), (other, more) in itertools.combinations(groups, 2):
        if (of_heads[heads[0]] == of_heads[more[0]]).all() and not of_heads[more[0]].all():
            message = f"{one!r} and {other!r} allow the same {at}."
            yield Finding("equal-heads", message, tuple(sorted(heads + more)))
    for name in spec.inputs:
        axes = [i for i, x in enumerate(unknown_leaves(spec, {})) if name in x.inputs]
        if all((allowed.take(0, i) == allowed.take(1, i)).all() for i in axes):
            message = f"Whatever `{name}` holds, the rule allows the same {at}."
            yield Finding("input-changes-nothing", message)


def dead_rows(spec: MaskSpec, allowed: np.ndarray, marks: Arrays) -> Iterator[Finding]:
    """Real queries that see nothing. `allowed` `(B, H, T, S)`; `marks` `(B, S)`, true where real.

    `Nothing()` is how a head is switched off.
    """
    dead: Any = ~allowed.any(-1)
    for real in marks.values():
        dead = dead & real[:, None] if real.shape[1] == dead.shape[2] else dead
    by_rows: dict[tuple[int, ...], list[int]] = {}
    for head in np.flatnonzero(dead.any((0, 2))).tolist():
        rule, some = spec.for_head(head), np.flatnonzero(dead[:, head].any(0)).tolist()
        if rule.constant is not False or rule.children:
            by_rows.setdefault(tuple(some), []).append(head)
    for rows, heads in by_rows.items():
        text = words.numbers_in_words(rows)
        text = text if len(text) < 60 else f"{rows[0]} to {rows[-1]} ({len(rows)} of them)"
        who = f"Query {text} sees" if len(rows) == 1 else f"Queries {text} see"
        message = f"{who} no key {_AT.format(*allowed.shape[2:])}: the output is 0."
        yield Finding("dead-rows", message, tuple(heads))


def padding_seen(allowed: np.ndarray, marks: Arrays) -> list[Finding]:
    """Heads whose real queries see padding, by each of `marks`: one that is obeyed is enough."""
    found: list[Finding] = []
    for name, real in marks.items():
        by_real = real[:, None, :, None] if allowed.shape[2] == allowed.shape[3] else True
        seen = (allowed & by_real).any(2)  # (B, H, S)
        of_padding, of_real = ((seen & x[:, None]).any((0, 2)) for x in (~real, real))
        message = f"Real queries see keys that `{name}` marks as padding. Add `& "
        message += f"recipes.padding({name!r})` to the rule, or see where the model loses the mask."
        if not (of_real & of_padding).any():
            message = f"Real queries see nothing but padding by `{name}`. True means a real token, "
            message += "and that a query may attend: invert the part that reads it, by ~."
        found.append(Finding("sees-padding", message, tuple(np.flatnonzero(of_padding).tolist())))
    return found[:1] if all(finding.heads for finding in found) else []


def end_id_pads(spec: MaskSpec, given: Arrays, marks: Arrays) -> Iterator[Finding]:
    """Ids that end a part of the sequence, but occur at padding alone."""
    for leaf in leaves(spec):
        if leaf.sampling.ids and not leaf.tiling.opens and not unknown_leaves(leaf, given):
            ids: Any = key_side(given[next(iter(leaf.inputs))])
            found = np.isin(ids, leaf.sampling.ids)
            real = [found & x for x in marks.values() if x.shape == found.shape]
            if real and found.any() and not np.logical_and.reduce(real).any():
                message = f"The ids that {leaf!r} looks for occur at padding alone: check them."
                yield Finding("end-id-pads", message)
