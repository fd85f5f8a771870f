"""Checks of the examples that a rule reads: padding, and ids."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import Subject, as_numpy, key_side, sides_of
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import InputType


def of_padding(subject: Subject, padding: np.ndarray, name: str, outside: Any) -> Iterator[Finding]:
    """Padding that real queries see, and rules that see little else.

    `padding` is true at real keys, `(B, S)`. `outside` is the mask that reaches the layer beside
    the rule, True where none does, or None where no layer is known.
    """
    if subject.unknown:
        return
    seen = subject.possible if outside is None else subject.possible & outside
    real_query = padding[:, None, :, None] if subject.self_attention else True
    pad, real = (
        (seen & real_query & side[:, None, None, :]).sum((0, 2, 3)) for side in (~padding, padding)
    )
    inverted = _inverted_by_ids(subject, padding)
    if inverted:
        yield Finding(
            "error",
            "looks-inverted",
            f"Where `{name}` is true, `{inverted}` holds one id throughout; where it is false, "
            "several: it seems to be true at padding.",
            "Here true means a real token: pass the complement of the mask.",
        )
        return
    pad_rate, real_rate = pad / max((~padding).sum(), 1), real / max(padding.sum(), 1)
    turned = (pad > real) & (pad_rate > 2 * real_rate)
    for _, heads in subject.groups:
        if some := tuple(head for head in heads if turned[head]):
            share = pad[some[0]] / (pad[some[0]] + real[some[0]])
            yield Finding(
                "error",
                "looks-inverted",
                f"Of the keys that real queries see, {share:.0%} are padding by `{name}`.",
                "True means that a query may attend: turn the part that reads it around by ~.",
                some,
            )
    if missing := tuple(np.flatnonzero((pad > 0) & ~turned).tolist()):
        meant = outside is None and name not in subject.spec.inputs
        yield Finding(
            "info" if meant else "warning",
            "padding-missing",
            f"Real queries see keys that `{name}` marks as padding.",
            "It is as it should be where the layer is given the padding mask beside its rule. Else "
            f"add `& recipes.padding({name!r})`."
            if outside is None
            else "No padding mask reaches the layer: add "
            f"`& recipes.padding({name!r})` to the rule, or see where the model loses it.",
            missing,
        )


def of_masks_beside(subject: Subject, outside: Any) -> Iterator[Finding]:
    """Heads of which the masks that reach the layer beside the rule hide all that it shows."""
    if subject.unknown:
        return
    possible = subject.possible
    hidden = possible.any((0, 2, 3)) & ~(possible & outside).any((0, 2, 3))
    if heads := tuple(np.flatnonzero(hidden).tolist()):
        yield Finding(
            "error",
            "head-off",
            "What the rule shows, the masks that reach the layer beside it hide: the output is 0.",
            "True means that a query may attend: look for a part that should be turned by ~.",
            heads,
        )


def _inverted_by_ids(subject: Subject, padding: np.ndarray) -> str | None:
    """The ids that show a padding mask to be inverted: they vary only where it is false."""
    for name, value in subject.given.items():
        ids = key_side(value, dtype=None)
        if ids is None or ids.shape != padding.shape or ids.dtype == bool:
            continue
        shown, hidden = np.unique(ids[padding]), np.unique(ids[~padding])
        if len(shown) == 1 and padding.sum() > 1 and len(hidden) > 2 and shown[0] not in hidden:
            return name
    return None


def never_read(name: str, is_padding: bool) -> Finding:
    return Finding(
        "warning",
        "input-never-read",
        f"`{name}` is handed in, but nothing reads it.",
        f"Add `& recipes.padding({name!r})` to the rule, or leave it out."
        if is_padding
        else "Leave it out, or correct the name in the rule.",
    )


def absent_ids(subject: Subject) -> Iterator[Finding]:
    """Ids that a rule waits for, and that occur nowhere in the examples."""
    for leaf in leaves(subject.spec):
        wanted = leaf.ids_of_interest
        if not wanted or not subject.has(leaf) or len(leaf.inputs) != 1:
            continue
        value = subject.given[next(iter(leaf.inputs))]
        sides = [np.asarray(x) for x in sides_of(value) if x is not None]
        if not any(np.isin(side, wanted).any() for side in sides):
            yield Finding(
                "info",
                "ids-absent",
                f"None of the ids that {leaf!r} waits for occurs in the examples.",
                "Check the ids against the vocabulary of the tokenizer.",
            )


def whole_numbers(spec: MaskSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Inputs that can be evaluated, and findings on those whose ids would collide."""
    usable, findings = {}, []
    for name, value in given.items():
        kind = spec.inputs[name]
        sides = [None if x is None else as_numpy(x) for x in sides_of(value)]
        floats = any(x is not None and x.dtype.kind not in "iub" for x in sides)
        present = [x.ravel() for x in sides if x is not None]
        if not present:
            usable[name] = value  # `make_mask` will say what is missing
            continue
        distinct = np.unique(np.concatenate([x.astype("float64") for x in present]))
        if floats:
            findings.append(_float_ids(name, kind, distinct))
            if (distinct != np.round(distinct)).any() or kind.rank is None:
                continue
            sides = [None if x is None else x.astype("int64") for x in sides]
        elif kind.dtype != "bool":
            whole = np.unique(np.concatenate([x.astype("int64") for x in present]))
            if len(np.unique(whole.astype("int32"))) < len(whole):
                findings.append(
                    Finding(
                        "warning",
                        "ids-collide",
                        f"`{name}` holds different ids that are equal in their last 32 bits, which "
                        "is all that JAX keeps.",
                        "Number the ids anew, from 0: np.unique(ids, return_inverse=True).",
                    )
                )
        usable[name] = sides[0] if len(sides) == 1 else tuple(sides)
    return usable, findings


def _float_ids(name: str, kind: InputType, distinct: np.ndarray) -> Finding:
    import ml_dtypes

    rounded = distinct.astype("float32").astype(ml_dtypes.bfloat16).astype("float64")
    lost = len(distinct) - len(np.unique(rounded))
    merged = ""
    if lost:
        first = next(i for i in range(1, len(distinct)) if rounded[i] == rounded[i - 1])
        merged = f": {distinct[first - 1]:g} and {distinct[first]:g} are equal in bfloat16"
    return Finding(
        "error",
        "ids-collide",
        f"`{name}` holds floats, which mixed precision rounds{merged}; a layer refuses them.",
        f'Declare it as keras.Input(..., dtype="{kind.dtype}"), or cast it before the call.',
    )
