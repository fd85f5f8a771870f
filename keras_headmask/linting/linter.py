"""What is likely wrong with a rule, found before a model is trained under it.

A rule is evaluated for whole masks, in NumPy. A mask input that is not given may hold anything:
each leaf that reads it is tried as true and as false, so what is found holds whatever it holds.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_headmask.linting import input_checks, rule_checks
from keras_headmask.linting.findings import Finding as Finding
from keras_headmask.linting.findings import Findings
from keras_headmask.linting.subject import Subject
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.examples import key_side, marks_padding


def lint(
    rule: Any,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
) -> Findings:
    """What is likely wrong with a rule, or with the rules of a model.

    Args:
        rule: A `MaskSpec`; or a model with a graph that holds rules, by `apply_head_masks` or in
            layers of this package, each of which is looked at with the masks that reach it, such
            as its padding.
        queries: Number of queries; by default that of `mask_inputs`, or a length at which every
            number of the rule matters. Not for a model.
        keys: Number of keys; as many as queries by default. Not for a model.
        num_heads: Number of heads; by default one more than the rule names. Not for a model.
        mask_inputs: Examples of what the rule reads, as for `make_mask`; for a model, of its inputs
            by name. What is not given may hold anything. `attention_mask`, and a name that holds
            "padding_mask", mark real tokens by true; `key_padding_mask` does not count, since it is
            true at padding in PyTorch.
        query_offset: Query i stands at position i + `query_offset`.

    Returns:
        A list of `Finding`, errors first. Codes: `head-off`, `dead-rows`, `unseen-keys`,
        `clause-changes-nothing`, `equals-default`, `never-self`, `looks-inverted`,
        `padding-missing`, `input-never-read`, `full-cost`, `ids-collide`, `ids-absent`,
        `ids-at-padding`, `open-side`, `unsound-spec`, `not-checked`.

    Raises:
        TypeError: if `rule` is neither a spec nor a model under a rule.
        ValueError: if lengths, heads or inputs do not fit one another.

    >>> from keras_headmask import PerHead, Window
    >>> print(lint(PerHead({0: Window(before=2, after=-1)}), queries=8, num_heads=12))
    warning: dead-rows, head 0: Query 0 sees no key, so its output is 0.
        Open at least one key to each query, such as itself: rule | Window(0, 0).
    info: unseen-keys, head 0: Key 7 is seen by no query of these heads.
        If that is not meant, widen the rule.
    info: never-self, head 0: No query may attend to itself.
        If that is not meant, add `| Window(0, 0)`.
    """
    if mask_inputs is not None and not isinstance(mask_inputs, Mapping):
        kind = type(mask_inputs).__name__
        raise TypeError(f"`mask_inputs` must be a dict from names to arrays. Received: {kind}.")
    if not isinstance(rule, MaskSpec):
        from keras_headmask.linting import model_checks  # needs all of retrofit/

        survey = model_checks.survey_of(rule)
        if (queries, keys, num_heads, query_offset) != (None, None, None, 0):
            raise ValueError(
                "`queries`, `keys`, `num_heads` and `query_offset` follow from the model: pass "
                "`mask_inputs` alone, a dict of its inputs."
            )
        return Findings(model_checks.check_model(survey, mask_inputs))
    inputs = dict(mask_inputs or {})
    marks: dict[str, np.ndarray] = {}
    for name in filter(marks_padding, inputs):
        kind, side = rule.inputs.get(name), key_side(inputs[name])
        if side is not None and (kind is None or kind.rank):
            marks[name] = side.astype(bool)
    unread = sorted(inputs.keys() - rule.inputs.keys() - marks.keys())  # the lint reads those
    findings = [input_checks.never_read(name, False) for name in unread]
    usable, odd = input_checks.whole_numbers(rule, inputs)
    name, padding = marks.popitem() if len(marks) == 1 else ("", None)
    subject = Subject(rule, num_heads, queries, keys, usable, query_offset, padding)
    if padding is not None and padding.shape[1] != subject.keys:
        raise ValueError(
            f"`mask_inputs[{name!r}]` has length {padding.shape[1]} where the attention has "
            f"{subject.keys} keys."
        )
    findings += [*odd, *input_checks.absent_ids(subject), *rule_checks.check_positions(subject)]
    findings += input_checks.ids_at_padding(subject, padding, name)
    if padding is not None:
        findings += input_checks.check_padding(subject, padding, name, None)
    return Findings(findings)
