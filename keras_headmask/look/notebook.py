"""Specs and masked models show themselves in a notebook.

`install` puts the methods on their classes, since drawing stands above both. IPython falls back to
`repr` where they return `None`.
"""

import base64
import dataclasses
import functools
import html
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.look import panels
from keras_headmask.look.drawing import draw
from keras_headmask.retrofit.finding import find_attention
from keras_headmask.retrofit.masked_layer import MaskedLayer
from keras_headmask.retrofit.report import spec_of
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec, leaves

_SHORTEST, _LONGEST = 12, 4096  # positions of the example that is drawn
_ONE_BY_ONE = 128  # more are drawn as tiles
_MOST_RULES = 4  # of a model that are drawn
_MOST_GROUPS = 16  # of heads with one rule, of a spec


def _never_raises(show: Callable[..., str | None]) -> Callable[..., str | None]:
    """A look at a value must not stop a notebook."""

    @functools.wraps(show)
    def guarded(*values: Any) -> str | None:
        try:
            return show(*values)
        except Exception:  # whatever a spec of someone's own or a half-made model raises
            return None

    return guarded


@_never_raises
def _spec_html(spec: MaskSpec) -> str:
    """The rule, and a picture of what it says of positions alone."""
    return _rule_html(spec)


def _rule_html(spec: MaskSpec, num_heads: int | None = None) -> str:
    """A rule, and a picture of it.

    With `num_heads` it is the rule of a layer, whose restricted heads must be seen: inputs that
    they read are made up.
    """
    lines = words.sentences(spec, num_heads)
    groups, others = words.ordered_groups(spec, num_heads)
    for rule, heads in groups:
        if rule.inputs:
            whose = panels.head_names(heads, others) if len(groups) > 1 else "the rule"
            inputs = ", ".join(f"{name!r}: ..." for name in sorted(rule.inputs))
            lines.append(f"A picture of {whose}: plot(rule, ..., mask_inputs={{{inputs}}})")
    text = f"<pre>{html.escape(chr(10).join(lines))}</pre>"
    drawn = [group for group in groups if _can_be_drawn(group[0], num_heads is not None)]
    if len(drawn) < len(groups) and all(words.sees_everything(rule) for rule, _ in drawn):
        return text  # a full square shows nothing of the heads that are restricted
    if more := drawn[_MOST_GROUPS:]:
        first = panels.head_names(more[0][1], others)
        text += f"<p>Not drawn: {len(more)} more rules, the first that of {first}.</p>"
    if len(groups) == 1:
        others = None
    return text + _picture(spec, drawn[:_MOST_GROUPS], num_heads or len(groups), others)


def _can_be_drawn(rule: MaskSpec, made_up: bool) -> bool:
    """Whether its inputs, if any, may be made up; a whole mask would show nothing of the model."""
    kinds = rule.inputs.values()
    return not kinds or (made_up and all(kind.rank is not None for kind in kinds))


def _picture(
    spec: MaskSpec,
    groups: list[tuple[MaskSpec, tuple[int, ...]]],
    num_heads: int,
    others: int | None,
) -> str:
    """The rules of `groups` over an example's length."""
    if not groups:
        return ""
    length = _telling_length(rule for rule, _ in groups)
    caption = f"over {length} positions"
    read = sorted({name for rule, _ in groups for name in rule.inputs})
    if read:
        names = ", ".join(f"`{name}`" for name in read)
        caption += f"; {names} {'is' if len(read) == 1 else 'are'} made up"
    made_up = {name: _made_up(spec, name, length) for name in read}
    given = [{name: made_up[name] for name in rule.inputs} or None for rule, _ in groups]
    try:
        from keras_headmask.look.figures import masks_figure
    except ImportError:
        texts = [caption] if read else []
        for (rule, heads), inputs in zip(groups, given, strict=True):
            cells = draw(rule, length, mask_inputs=inputs)
            texts.append(f"{panels.head_names(heads, others)}:\n{cells}")
        return f"<pre>{html.escape(chr(10).join(texts))}</pre>"
    drawn = None
    shown: list[panels.Panel] = []
    for (rule, heads), inputs in zip(groups, given, strict=True):
        drawn = panels.panels_of(
            rule, length, None, 1, inputs, 0, 0, None, None, longest=_ONE_BY_ONE
        )
        shown.append(panels.Panel(tuple(heads), drawn.panels[0].cells))
    picture = masks_figure(
        drawn._replace(panels=shown, num_heads=num_heads, others=others), [caption]
    )
    data = base64.b64encode(picture.png(dpi=80)).decode()
    alt = html.escape(repr(spec), quote=True)
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _made_up(spec: MaskSpec, name: str, length: int) -> np.ndarray:
    """An input that `spec` reads, such that its rules hide some pairs and allow some.

    Three runs of positions are segments, or sentences by their last token; ids that are looked for
    besides come first; the last quarter is padding.
    """
    positions = np.arange(length)
    run = 5 * length // 12
    if name == "padding_mask":
        return (positions < 3 * length // 4)[None]
    is_last = positions % run == run - 1
    readers = [leaf for leaf in leaves(spec) if name in leaf.inputs]
    ends = [leaf.end_ids[0] for leaf in readers if hasattr(leaf, "end_ids")]
    looked_for = {i for leaf in readers for i in getattr(leaf, "end_ids", getattr(leaf, "ids", ()))}
    if looked_for:
        # Most tokens are none that a leaf looks for: they obey what the rule says of the rest.
        made_up = np.full(length, max(looked_for) + 1)
        free = dict.fromkeys(leaf.ids for leaf in readers if hasattr(leaf, "ids"))
        special = [next((i for i in ids if i not in ends), ids[0]) for ids in free]
        made_up[is_last] = np.resize(sorted(set(ends or special)), is_last.sum())
        if ends:
            made_up[: len(special)] = special
        return made_up[None]
    return (is_last if spec.inputs[name].dtype == "bool" else positions // run)[None]


def _telling_length(rules: Any) -> int:
    """Positions enough to see the largest number that `rules` speak of."""
    numbers = [
        abs(value)
        for rule in rules
        for leaf in leaves(rule)
        for field in dataclasses.fields(leaf)
        if field.name != "seed" and isinstance(value := getattr(leaf, field.name), int)
    ]
    return min(max(2 * max(numbers, default=0) + 2, _SHORTEST), _LONGEST)


_layer_html = _never_raises(_rule_html)


@_never_raises
def _model_html(model: keras.Model) -> str | None:
    """The layers under a rule, and their rules; `None` for a model without a masked layer."""
    if not any(isinstance(layer, MaskedLayer) for layer in _keras.layers_of(model)):
        return None
    layers: dict[tuple[MaskSpec, int], list[str]] = {}
    for entry in find_attention(model).known:
        if (spec := spec_of(entry.layer)) is not None:
            layers.setdefault((spec, entry.layer.num_heads), []).append(entry.path)
    parts = [f"<p>{html.escape(f'{type(model).__name__} {model.name!r}, under rules:')}</p>"]
    for number, ((spec, num_heads), paths) in enumerate(layers.items()):
        names = html.escape("\n".join(paths if len(paths) < 9 else [*paths[:7], "...", paths[-1]]))
        parts.append(f"<pre>{names}</pre>")
        shown = _layer_html(spec, num_heads) if number < _MOST_RULES else None
        parts.append(shown or f"<pre>{html.escape(repr(spec))}</pre>")
    return "\n".join(parts)


def install() -> None:
    """Let every spec and every masked model show itself."""
    MaskSpec._repr_html_ = _spec_html
    keras.Model._repr_html_ = _model_html
