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

from keras_headmask import describing, panels
from keras_headmask.drawing import draw
from keras_headmask.masked_model import HeadMasked
from keras_headmask.per_head import head_groups
from keras_headmask.specs import MaskSpec, leaves

_SHORTEST, _LONGEST = 12, 4096  # positions of the example that is drawn
_ONE_BY_ONE = 128  # more are drawn as tiles
_MOST_RULES = 4  # of a model that are drawn
_MOST_GROUPS = 16  # of heads with one rule, of a spec


def _never_raises(show: Callable[[Any], str]) -> Callable[[Any], str | None]:
    """A look at a value must not stop a notebook."""

    @functools.wraps(show)
    def guarded(value: Any) -> str | None:
        try:
            return show(value)
        except Exception:  # whatever a spec of someone's own or a half-made model raises
            return None

    return guarded


@_never_raises
def _spec_html(spec: MaskSpec) -> str:
    """The rule, and a picture of what it says of positions alone."""
    num_heads = describing.enough_heads(spec)
    lines = describing.sentences(spec, num_heads)
    groups = head_groups(spec, num_heads)
    for rule, heads in groups:
        if rule.inputs:
            whose = panels.head_names(heads) if len(groups) > 1 else "the rule"
            inputs = ", ".join(f"{name!r}: ..." for name in sorted(rule.inputs))
            lines.append(f"A picture of {whose}: plot(rule, ..., mask_inputs={{{inputs}}})")
    text = f"<pre>{html.escape(chr(10).join(lines))}</pre>"
    drawn = [group for group in groups if not group[0].inputs]
    if more := drawn[_MOST_GROUPS:]:
        first = panels.head_names(more[0][1])
        text += f"<p>Not drawn: {len(more)} more rules, the first that of {first}.</p>"
    return text + _picture(spec, num_heads, drawn[:_MOST_GROUPS])


def _picture(spec: MaskSpec, num_heads: int, groups: list[tuple[MaskSpec, tuple[int, ...]]]) -> str:
    """The rules of `groups`, which read no inputs, over an example's length."""
    if not groups:
        return ""
    length = _telling_length(rule for rule, _ in groups)
    try:
        from keras_headmask.figures import masks_figure
    except ImportError:
        names = [panels.head_names(heads) for _, heads in groups]
        texts = [f"{name}:\n{draw(g[0], length)}" for name, g in zip(names, groups, strict=True)]
        return f"<pre>{html.escape(chr(10).join(texts))}</pre>"
    drawn = None
    shown: list[panels.Panel] = []
    for rule, heads in groups:
        drawn = panels.panels_of(rule, length, None, 1, None, 0, 0, None, None, longest=_ONE_BY_ONE)
        shown.append(panels.Panel(heads, drawn.panels[0].cells))
    picture = masks_figure(
        drawn._replace(panels=shown, num_heads=num_heads), [f"over {length} positions"]
    )
    data = base64.b64encode(picture.png(dpi=80)).decode()
    alt = html.escape(repr(spec), quote=True)
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


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


@_never_raises
def _model_html(model: HeadMasked) -> str:
    """The layers under a rule, and their rules."""
    layers: dict[MaskSpec, list[str]] = {}
    for path, spec in model.mask_specs.items():
        layers.setdefault(spec, []).append(path)
    parts = [f"<p>{html.escape(f'{type(model).__name__} {model.name!r}, under rules:')}</p>"]
    for number, (spec, paths) in enumerate(layers.items()):
        names = html.escape("\n".join(paths if len(paths) < 9 else [*paths[:7], "...", paths[-1]]))
        parts.append(f"<pre>{names}</pre>")
        shown = _spec_html(spec) if number < _MOST_RULES else None
        parts.append(shown or f"<pre>{html.escape(repr(spec))}</pre>")
    return "\n".join(parts)


def install() -> None:
    """Let every spec and every masked model show itself."""
    MaskSpec._repr_html_ = _spec_html
    HeadMasked._repr_html_ = _model_html
