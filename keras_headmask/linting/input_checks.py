"""Checks of the examples that a rule reads: padding, and ids."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import Subject, numbers_of
from keras_headmask.masks import Mask
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.examples import key_side, sides_of

_CHECK_IDS = "Check the ids against the vocabulary of the tokenizer."


def check_padding(
    subject: Subject,
    padding: np.ndarray,
    name: str,
    outside: Mask | None,
) -> Iterator[Finding]:
    """Padding that real queries see, and rules that see little else.

    `padding` is true at real keys, `(B, S)`. `outside` is the mask that reaches the layer beside
    the rule, True where none does, or None where no layer is known.
    """
    if subject.unknown:
        return
    if ids := _inverted_by_ids(subject, padding):
        message = f"Where `{name}` is true, `{ids}` holds one id throughout; where it is false, "
        message += "several: it seems to be true at padding."
        way_out = "Here true means a real token: pass the complement of the mask."
        yield Finding("error", "looks-inverted", message, way_out)
        return
    seen = subject.possible & (True if outside is None else outside)
    if subject.self_attention:
        seen = seen & padding[:, None, :, None]  # by real queries
    pad, real = ((seen & x[:, None, None, :]).sum((0, 2, 3)) for x in (~padding, padding))
    pad_rate, real_rate = pad / max((~padding).sum(), 1), real / max(padding.sum(), 1)
    inverted = (pad > real) & (pad_rate > 2 * real_rate)
    for _, heads in subject.groups:
        if some := tuple(head for head in heads if inverted[head]):
            share = pad[some[0]] / (pad[some[0]] + real[some[0]])
            way_out = "True means that a query may attend: invert the part that reads it, by ~."
            message = f"Of the keys that real queries see, {share:.0%} are padding by `{name}`."
            yield Finding("error", "looks-inverted", message, way_out, some)
    if missing := numbers_of((pad > 0) & ~inverted):
        severity, message = "warning", f"Real queries see keys that `{name}` marks as padding."
        add = f"add `& recipes.padding({name!r})`"
        way_out = f"No padding mask reaches the layer: {add} to the rule, or see where the model "
        way_out += "loses it."
        if outside is None:
            severity = "warning" if name in subject.spec.inputs else "info"
            way_out = "Nothing is wrong if the layer is given the padding mask beside its rule. "
            way_out += f"Otherwise {add}."
        yield Finding(severity, "padding-missing", message, way_out, missing)


def check_masks_beside(subject: Subject, outside: Mask) -> Iterator[Finding]:
    """Heads of which the masks that reach the layer beside the rule hide all that it shows."""
    if subject.unknown:
        return
    shown, left = (x.any((0, 2, 3)) for x in (subject.possible, subject.possible & outside))
    if heads := numbers_of(shown & ~left):
        message = "The masks beside the rule hide all that it shows: the output is 0."
        way_out = "True means that a query may attend: look for a part that ~ should invert."
        yield Finding("error", "head-off", message, way_out, heads)


def _inverted_by_ids(subject: Subject, padding: np.ndarray) -> str | None:
    """The ids that show a padding mask to be inverted: they vary only where it is false."""
    for name, value in subject.given.items():
        ids = key_side(value)
        if ids is None or ids.shape != padding.shape or ids.dtype == bool:
            continue
        shown, hidden = np.unique(ids[padding]), np.unique(ids[~padding])
        if len(shown) == 1 and padding.sum() > 1 and len(hidden) > 2 and shown[0] not in hidden:
            return name
    return None


def never_read(name: str, is_padding: bool) -> Finding:
    way_out = "Leave it out, or correct the name in the rule."
    if is_padding:
        way_out = f"Add `& recipes.padding({name!r})` to the rule, or leave it out."
    message = f"`{name}` is passed, but nothing reads it."
    return Finding("warning", "input-never-read", message, way_out)


def _looked_for(subject: Subject) -> Iterator[tuple[MaskSpec, str]]:
    """Each leaf that looks for ids and has examples of them, and the name of these."""
    for leaf in leaves(subject.spec):
        if leaf.sampling.ids and subject.has(leaf) and len(leaf.inputs) == 1:
            yield leaf, next(iter(leaf.inputs))


def absent_ids(subject: Subject) -> Iterator[Finding]:
    """Ids that a rule looks for, and that the examples lack."""
    for leaf, name in _looked_for(subject):
        sides = [side for side in sides_of(subject.given[name]) if side is not None]
        if not any(np.isin(side, leaf.sampling.ids).any() for side in sides):
            message = f"None of the ids that {leaf!r} looks for occurs in the examples."
            yield Finding("info", "ids-absent", message, _CHECK_IDS)


def ids_at_padding(subject: Subject, padding: np.ndarray | None, name: str) -> Iterator[Finding]:
    """Ids that a rule looks for, and that occur at padding alone.

    `padding` is true at real keys. Without one, ids that repeat at the end of sequences, and occur
    nowhere else, are likely padding.
    """
    for leaf, read in _looked_for(subject):
        ids = key_side(subject.given[read])
        if ids is None or (leaf.tiling.opens and not _is_unnegated(subject, leaf)):
            continue  # (~KeyIn of padding hides it.)
        looked_for = np.isin(ids, leaf.sampling.ids)
        if padding is not None:
            at_padding, severity = ~padding, "warning"
            where = f"only where `{name}` marks padding"
        else:
            at_padding = np.logical_and.accumulate(looked_for[:, ::-1], axis=1)[:, ::-1]
            severity, where = "info", "only at the end of sequences, as padding does"
            if at_padding.all(1).any() or not at_padding[:, -2:].all(1).any():
                continue
        if (
            looked_for.any()
            and looked_for.shape == at_padding.shape
            and not (looked_for & ~at_padding).any()
        ):
            message = f"The ids that {leaf!r} looks for occur {where}."
            way_out = f"{_CHECK_IDS} To hide padding, use a padding mask or ~KeyIn(...)."
            yield Finding(severity, "ids-at-padding", message, way_out)


def _is_unnegated(subject: Subject, leaf: MaskSpec) -> bool:
    """Whether `leaf` stands somewhere under no `~`, or under an even number of them."""

    def either(a: tuple[bool, bool], b: tuple[bool, bool]) -> tuple[bool, bool]:
        return a[0] or b[0], a[1] or b[1]

    folded = (
        rule.fold(lambda spec: (spec == leaf, False), either, either, lambda a: (a[1], a[0]))
        for rule, _ in subject.groups
    )
    return any(is_there for is_there, _ in folded)


def whole_numbers(spec: MaskSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """The inputs of `given` that the spec reads; findings on ids that would collide."""
    usable, findings = {}, []
    for name, kind in spec.inputs.items():
        if name not in given:
            continue
        sides = sides_of(given[name])
        present = [side.ravel() for side in sides if side is not None]
        if any(side.dtype.kind not in "iub" for side in present):
            distinct = np.unique(np.concatenate([x.astype("float64") for x in present]))
            findings.append(_float_ids(name, kind.dtype, distinct))
            if (distinct != np.round(distinct)).any() or kind.rank is None:
                continue
            sides = [None if x is None else x.astype("int64") for x in sides]
        elif present and kind.dtype != "bool":
            whole = np.unique(np.concatenate([x.astype("int64") for x in present]))
            if len(np.unique(whole.astype("int32"))) < len(whole):
                message = f"`{name}` holds different ids that are equal in their last 32 bits, "
                message += "which is all that JAX keeps."
                way_out = "Number the ids anew, from 0: np.unique(ids, return_inverse=True)."
                findings.append(Finding("warning", "ids-collide", message, way_out))
        usable[name] = sides[0] if len(sides) == 1 else tuple(sides)
    return usable, findings


def _float_ids(name: str, dtype: str, distinct: np.ndarray) -> Finding:
    import ml_dtypes

    rounded = distinct.astype("float32").astype(ml_dtypes.bfloat16)
    merged = ""
    if (equal := np.flatnonzero(rounded[1:] == rounded[:-1])).size:
        first, second = distinct[equal[0] : equal[0] + 2]
        merged = f": {first:g} and {second:g} are equal in bfloat16"
    message = f"`{name}` holds floats, which mixed precision rounds{merged}; a layer refuses them."
    way_out = f'Declare it as keras.Input(..., dtype="{dtype}"), or cast it before the call.'
    return Finding("error", "ids-collide", message, way_out)
