"""What is likely wrong with the rules of a model, by what one forward of it shows."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from keras_headmask.attention.lost_masks import marks_padding
from keras_headmask.linting import input_checks, model_facts, rule_checks
from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import Subject
from keras_headmask.retrofit.find import AttentionLayer, longest_sequence
from keras_headmask.rules.base import check_spec


def layers_under_rules(model: Any) -> list[AttentionLayer]:
    """The attention layers of `model` that have rules.

    Raises:
        TypeError: if no layer has one, or it is not a model.
    """
    if entries := model_facts.layers_under_rules(model):
        return entries
    if hasattr(model, "layers"):
        raise TypeError(
            "`rule` must be a mask spec, or a model that has rules by `apply_head_masks` or in its "
            f"layers. Received a model without, or without a graph: {model!r}. The rule of a layer "
            "is linted by itself, too: `hm.lint(layer.mask_spec, ...)`."
        )
    check_spec(model, "rule", "hm.lint(SPEC)")
    return []


def of_a_model(
    model: Any, entries: list[AttentionLayer], inputs: Mapping[str, Any] | None
) -> Iterator[Finding]:
    found: dict[Finding, list[str]] = {
        input_checks.never_read(name, marks_padding(name)): []
        for name in model_facts.unread_inputs(model)
    }
    layers, problem = model_facts.seen_in_a_forward(model, entries, inputs)
    if problem:
        reason = f"Padding was not checked, since the model failed on made-up inputs: {problem}"
        way_out = "Pass examples of its inputs as `mask_inputs`."
        found[Finding("info", "not-checked", reason, way_out)] = []
    most = longest_sequence(model)
    looked_at: dict[Any, list[Finding]] = {}
    for layer in layers:
        if layer.key not in looked_at:
            looked_at[layer.key] = list(_of_a_layer(layer, inputs is not None, most))
        for finding in looked_at[layer.key]:
            found.setdefault(finding, []).append(layer.entry.path)
    for finding, paths in found.items():
        yield dataclasses.replace(finding, layers=tuple(paths))


def _of_a_layer(
    layer: model_facts.SeenLayer, has_examples: bool, most: int | None
) -> Iterator[Finding]:
    heads, is_cross = layer.entry.num_heads, layer.entry.kind == "cross"
    subject_of = functools.partial(Subject, layer.spec, heads, is_cross=is_cross)
    given, odd = input_checks.whole_numbers(layer.spec, layer.given if has_examples else {})
    yield from odd
    queries, keys = layer.lengths or (None, None)
    subject = subject_of(queries, keys, given) if has_examples else subject_of()
    if subject.is_chosen and most is not None and most < subject.enough:
        subject = subject_of(most, most, given)  # there are no more positions
    yield from input_checks.absent_ids(subject)
    hidden = rule_checks.hidden_sides(layer.outside, layer.lengths)
    yield from rule_checks.of_positions(subject, hidden)
    if not layer.paddings:
        yield from input_checks.ids_at_padding(subject, None, "")
        return
    seen = subject_of(queries, keys, layer.given)
    for name, padding in layer.paddings.items():
        if has_examples or not marks_padding(name):  # (Of made-up ids a mask shows nothing.)
            yield from input_checks.ids_at_padding(seen, padding, name)
    of_each = [
        list(input_checks.of_padding(seen, padding, name, layer.outside))
        for name, padding in layer.paddings.items()
    ]
    if all(of_each):  # where several inputs could mark padding, all must
        yield from of_each[0]
    # (Made-up ids are all alike: what a rule makes of them says nothing.)
    if has_examples or all(map(marks_padding, layer.spec.inputs)):
        yield from input_checks.of_masks_beside(seen, layer.outside)
