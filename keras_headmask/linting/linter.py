"""What is likely wrong with a rule, found before a model is trained under it."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask.linting import checks
from keras_headmask.linting.checks import Finding as Finding
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.examples import key_side, length_of, marks_padding
from keras_headmask.rules.fields import whole_number


class Findings(list[Finding]):
    """A list of `Finding`; printed, a line for each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "No findings."


def lint(
    rule: Any,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
) -> Findings:
    """What is likely wrong with a rule, or with the rules of a model.

    It asks the mask at the lengths given, at those of `mask_inputs`, or at a small one at which
    every number of the rule matters. Messages say at which.

    Args:
        rule: A `MaskSpec`; or a functional model that holds rules, which runs once, on
            `mask_inputs` or on made-up inputs. All else follows from it.
        queries, keys: Their numbers; as many keys as queries by default.
        num_heads: Number of heads; by default one more than the rule names.
        mask_inputs: Examples of what the rule reads, as for `make_mask`; for a model, of its inputs
            by name. What is not given may hold anything. `attention_mask`, and a name that holds
            "padding_mask" but not "key_padding_mask" (PyTorch's), mark real tokens by true.

    Returns:
        A list of `Finding`. Codes: `dead-rows`, `equal-heads`, `hides-nothing`,
        `input-changes-nothing`, `sees-padding`, `end-id-pads`.

    Raises:
        TypeError: if `rule` is neither a spec nor a model under a rule.
        ValueError: if sizes or inputs do not fit, or there are too many pairs of positions.

    >>> from keras_headmask import Window
    >>> print(lint(Window(before=2, after=-1), queries=8))
    dead-rows, head 0: Query 0 sees no key at 8 x 8 positions: the output is 0.
    """
    if mask_inputs is not None and not isinstance(mask_inputs, Mapping):
        raise TypeError(f"`mask_inputs` must be a dict of arrays. Received: {mask_inputs!r}.")
    sizes = [x for x in (queries, keys, num_heads) if x is not None]
    if not isinstance(rule, MaskSpec):
        return Findings(_of_model(rule, mask_inputs, sizes))
    for size in sizes:
        whole_number(size, "queries, keys and num_heads", at_least=1)
    heads, inputs = num_heads or words.enough_heads(rule), dict(mask_inputs or {})
    marks = {x: key_side(inputs[x]) for x in inputs if marks_padding(x)}
    marks = {name: side != 0 for name, side in marks.items() if side is not None}
    given = {name: value for name, value in inputs.items() if name in rule.inputs}
    length, is_enough = checks.length_for(rule, heads)
    of_queries, of_keys = (length_of(rule, given, side) for side in (0, -1))
    rows = queries or of_queries or keys or of_keys or length
    allowed: Any = checks.masks(rule, heads, rows, keys or of_keys or rows, given)
    allowed = allowed.any(tuple(range(allowed.ndim - 4)))
    findings = Findings(checks.dead_rows(rule, allowed, marks))
    for name in sorted(inputs.keys() - given.keys() - marks.keys()):
        findings.append(Finding("input-changes-nothing", f"The rule does not read `{name}`."))
    if not checks.unknown_leaves(rule, given):
        findings += checks.padding_seen(allowed, {x: marks[x] for x in marks if x in given})
    findings += checks.end_id_pads(rule, given, marks)
    # (Of more inputs than that, examples show what they show.)
    few = len(checks.unknown_leaves(rule, {})) <= checks.MOST_UNKNOWN
    if few and (is_enough or queries or keys):
        blind = checks.masks(rule, heads, queries or keys or length, keys or queries or length, {})
        findings += checks.of_rule(rule, blind)
    return findings


def _of_model(model: Any, inputs: Mapping[str, Any] | None, sizes: Any) -> Iterator[Finding]:
    """See `lint`. Where a layer computes a probability above 0, it allows the pair."""
    from keras_headmask.retrofit.adapters import without_remat  # needs all of retrofit/
    from keras_headmask.retrofit.made_up import plain
    from keras_headmask.retrofit.observe import watched
    from keras_headmask.retrofit.survey import Survey

    if not isinstance(model, keras.Model):
        check_spec(model, "rule", "hm.lint(SPEC)")  # raises
    survey = Survey(model)
    if survey.graph is None or not survey.rules:
        raise TypeError(f"`rule` must be a functional model with rules. Received: {model!r}.")
    tensors = plain(survey) if inputs is None else {n: np.asarray(x) for n, x in inputs.items()}
    if sizes or tensors.keys() != survey.inputs.keys():
        raise ValueError(
            "A model is linted at the lengths of its inputs, and `mask_inputs` must hold each of "
            f"them: {list(survey.inputs)}. Received: {[*tensors, *sizes]}."
        )
    entries = [entry for entry in survey.known if entry.path in survey.rules]
    flat = [tensors[tensor.name] for tensor in survey.graph.inputs]
    with watched(entries) as seen, without_remat(model):
        survey.graph(keras.tree.pack_sequence_as(survey.graph.input, flat), training=False)
    names = survey.padding_inputs or survey.zero_padded_inputs
    marks = {name: tensors[name] != 0 for name in names if tensors[name].ndim == 2}
    unread = [f"Neither a layer nor a rule reads `{name}`." for name in survey.unread_inputs]
    paths: dict[Finding, list[str]] = {Finding("input-changes-nothing", x): [] for x in unread}
    for entry in entries:
        spec = survey.rules[entry.path]
        found = lint(spec, num_heads=entry.num_heads)  # what holds whatever the inputs hold
        for run in (x.probabilities for x in seen if x.path == entry.path):
            allowed = ops.convert_to_numpy(run) > 0
            mine = {name: x for name, x in marks.items() if x.shape[1] == allowed.shape[3]}
            found += checks.padding_seen(allowed, mine)
            # Made-up ids are all alike: what a rule makes of them says nothing.
            if inputs is not None or all(map(marks_padding, spec.inputs)):
                found = Findings(x for x in found if x.code != "dead-rows")
                found += checks.dead_rows(spec, allowed, mine)
            if inputs is not None or survey.zero_padded_inputs:
                given = {name: x for name, x in tensors.items() if name in spec.inputs}
                found += checks.end_id_pads(spec, given, mine)
        for finding in found:
            paths.setdefault(finding, []).append(entry.path)
    for finding, of_layers in paths.items():
        yield finding._replace(layers=tuple(of_layers))
