"""What is likely wrong with the rules of a model, by what one forward of it shows."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask.linting import input_checks, rule_checks
from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import Subject
from keras_headmask.masks import Mask, lift
from keras_headmask.retrofit.adapters import AttentionLayer, adapted
from keras_headmask.retrofit.made_up import plain
from keras_headmask.retrofit.rule import rules_in_force, spec_of
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.examples import marks_padding


@dataclasses.dataclass
class SeenLayer:
    """An attention layer, its rule, and one forward: mask inputs, lengths, other masks, padding.

    `outside` is the mask that reaches the layer beside its rule, `(B, 1 or H, T, S)` or True. (A
    layer that was built with the rule has ANDed it to that already.)
    """

    entry: AttentionLayer
    spec: MaskSpec
    given: Mapping[str, Any]
    lengths: tuple[int, int] | None = None
    outside: Mask = True
    paddings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> Any:
        """Equal for layers of which the same is found."""
        outside = None if self.outside is True else (self.outside.shape, self.outside.tobytes())
        given = tuple(map(id, keras.tree.flatten(self.given)))
        of_layer = self.entry.num_heads, self.entry.kind
        return self.spec, of_layer, given, self.lengths, outside


def survey_of(model: Any) -> Survey:
    """A survey of a model with a graph, some of whose attention layers have rules.

    Raises:
        TypeError: if no layer has one, or it is not a model.
    """
    if isinstance(model, keras.Model):
        survey = Survey(model)
        if survey.graph is not None and _under_rules(survey):
            return survey
    if not hasattr(model, "layers"):
        check_spec(model, "rule", "hm.lint(SPEC)")  # raises
    raise TypeError(
        "`rule` must be a mask spec, or a model that has rules by `apply_head_masks` or in its "
        f"layers. Received a model without, or without a graph: {model!r}. The rule of a layer "
        "is linted by itself, too: `hm.lint(layer.mask_spec, ...)`."
    )


def _under_rules(survey: Survey) -> list[AttentionLayer]:
    """Attention with a rule by `apply_head_masks` or of its own."""
    return [
        entry
        for entry in survey.known
        if rules_in_force(entry.layer) or getattr(entry.layer, "_restricts", False)
    ]


def check_model(survey: Survey, inputs: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What is likely wrong with the rules of a model; `inputs` as `lint` takes them."""
    paths_of: dict[Finding, list[str]] = {
        input_checks.never_read(name, marks_padding(name)): [] for name in survey.unread_inputs
    }
    layers, problem = _seen_in_a_forward(survey, inputs)
    if problem:
        reason = f"Padding was not checked, since the model failed on made-up inputs: {problem}"
        way_out = "Pass examples of its inputs as `mask_inputs`."
        paths_of[Finding("info", "not-checked", reason, way_out)] = []
    most = survey.longest_sequence
    looked_at: dict[Any, list[Finding]] = {}
    for layer in layers:
        if layer.key not in looked_at:
            looked_at[layer.key] = list(_check_layer(layer, inputs is not None, most))
        for finding in looked_at[layer.key]:
            paths_of.setdefault(finding, []).append(layer.entry.path)
    for finding, paths in paths_of.items():
        yield dataclasses.replace(finding, layers=tuple(paths))


def _check_layer(layer: SeenLayer, has_examples: bool, most: int | None) -> Iterator[Finding]:
    heads, is_cross = layer.entry.num_heads, layer.entry.kind == "cross"
    subject_of = functools.partial(Subject, layer.spec, heads, is_cross=is_cross)
    examples, odd = input_checks.whole_numbers(layer.spec, layer.given if has_examples else {})
    yield from odd
    queries, keys = layer.lengths or (None, None)
    subject = subject_of(queries, keys, examples) if has_examples else subject_of()
    if subject.is_chosen and most is not None and most < subject.enough:
        subject = subject_of(most, most, examples)  # there are no more positions
    yield from input_checks.absent_ids(subject)
    hidden = rule_checks.hidden_sides(layer.outside, layer.lengths)
    yield from rule_checks.check_positions(subject, hidden)
    if not layer.paddings:
        yield from input_checks.ids_at_padding(subject, None, "")
        return
    seen = subject_of(queries, keys, layer.given)
    for name, padding in layer.paddings.items():
        if has_examples or not marks_padding(name):  # (Of made-up ids a mask shows nothing.)
            yield from input_checks.ids_at_padding(seen, padding, name)
    of_each = [
        list(input_checks.check_padding(seen, padding, name, layer.outside))
        for name, padding in layer.paddings.items()
    ]
    if all(of_each):  # where several inputs could mark padding, all must
        yield from of_each[0]
    # (Made-up ids are all alike: what a rule makes of them says nothing.)
    if has_examples or all(map(marks_padding, layer.spec.inputs)):
        yield from input_checks.check_masks_beside(seen, layer.outside)


# --- One forward ---------------------------------------------------------------------------------


def _seen_in_a_forward(
    survey: Survey, inputs: Mapping[str, Any] | None
) -> tuple[list[SeenLayer], str]:
    """The layers under rules as one forward shows them; and why it does not, if it fails."""
    from keras_headmask.retrofit.observe import Run, runs_seen  # needs all of retrofit/

    problem, graph, entries = "", survey.graph, _under_rules(survey)
    tensors = plain(survey) if inputs is None else _checked(survey, inputs)
    runs: dict[str, Run] = {}  # the last of each layer, by its path

    def see(run: Run) -> None:
        runs[run.entry.path] = run

    try:
        # Eagerly, so that the masks are arrays.
        with runs_seen(entries, see):
            flat = [tensors[tensor.name] for tensor in graph.inputs]
            graph(keras.tree.pack_sequence_as(graph.input, flat), training=False)
    except Exception as error:  # of a layer that takes no such made-up inputs
        if inputs is not None:
            raise
        problem, runs = str(error).strip().split("\n")[0], {}
    paddings, layers = _paddings(survey, tensors), []
    for entry in entries:
        run = runs.get(entry.path)
        mask_inputs = {} if run is None else dict(run.call.get("mask_inputs") or {})
        for rule in rules_in_force(entry.layer):
            mask_inputs |= rule.inputs_from(tensors) if set(rule.reads) <= tensors.keys() else {}
        spec: Any = spec_of(entry.layer)
        mask_inputs = {name: mask_inputs[name] for name in spec.inputs if name in mask_inputs}
        layer = SeenLayer(entry, spec, mask_inputs)
        if run is not None:
            queries, keys = layer.lengths = tuple(run.probabilities.shape[-2:])
            if run.arguments["attention_mask"] is not None:
                layer.outside = ops.convert_to_numpy(lift(run.arguments["attention_mask"]))
            if (window := adapted(entry.layer).window(run.arguments)) is not None:
                of_window = ops.convert_to_numpy(make_mask(window, queries, keys))
                layer.outside = layer.outside & of_window
            if mask_inputs.keys() == spec.inputs.keys():
                layer.paddings = {name: p for name, p in paddings.items() if p.shape[1] == keys}
        layers.append(layer)
    return layers, problem


def _checked(survey: Survey, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    names = list(survey.inputs)
    if wrong := sorted(set(names) ^ set(inputs)):
        raise ValueError(
            "For a model, `mask_inputs` must hold each of its inputs: "
            f"{names}. Received: {sorted(inputs)}; {wrong[0]!r} is missing or unknown."
        )
    return {name: np.asarray(inputs[name]) for name in names}


def _paddings(survey: Survey, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs that mark padding: by name, or ids whose embedding masks zero."""
    names = survey.padding_inputs or survey.zero_padded_inputs
    return {name: tensors[name] != 0 for name in names if tensors[name].ndim == 2}
