"""What is likely wrong with a rule, found before a model is trained under it."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_headmask.rules import base, evaluation, words
from keras_headmask.rules.algebra import farthest
from keras_headmask.rules.base import MaskSpec, head_groups, leaves, whole_number
from keras_headmask.rules.evaluation import length_of, side_of
from keras_headmask.rules.leaves import ids_of, marks_padding
from keras_headmask.rules.protocol import BOTH

_SHORTEST, _UNKNOWN = 16, 256  # positions at which a rule is looked at
_MOST_UNKNOWN, _MOST_PAIRS = 6, 2**26
_AT = "at {} x {} positions"
_Arrays: TypeAlias = Mapping[str, Any]  # by name


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
        return f"{self.code}{heads}: {self.message}{layers}"


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
        return _of_model(rule, mask_inputs, sizes)
    for size in sizes:
        whole_number(size, "queries, keys and num_heads", at_least=1)
    heads, inputs = num_heads or base.enough_heads(rule), dict(mask_inputs or {})
    sides = {name: side_of(inputs[name], -1) for name in inputs if marks_padding(name)}
    marks = {name: x != 0 for name, x in sides.items() if x is not None and x.ndim == 2}
    given = {name: value for name, value in inputs.items() if name in rule.inputs}
    length, is_enough = _length_for(rule, heads)
    of_queries, of_keys = (length_of(rule, given, side) for side in (0, -1))
    rows = queries or of_queries or keys or of_keys or length
    allowed: Any = _masks(rule, heads, rows, keys or of_keys or rows, given)
    allowed = allowed.any(tuple(range(allowed.ndim - 4)))
    findings = Findings(_dead_rows(rule, allowed, marks))
    for name in sorted(inputs.keys() - given.keys() - marks.keys()):
        findings.append(Finding("input-changes-nothing", f"The rule does not read `{name}`."))
    if not _unknown_leaves(rule, given):
        findings += _padding_seen(allowed, {x: marks[x] for x in marks if x in given})
    findings += _end_id_pads(rule, given, marks)
    # (Of more inputs than that, examples show what they show.)
    if len(_unknown_leaves(rule, {})) <= _MOST_UNKNOWN and (is_enough or queries or keys):
        blind = _masks(rule, heads, queries or keys or length, keys or queries or length, {})
        findings += _of_rule(rule, blind)
    return findings


def _of_model(model: Any, inputs: Mapping[str, Any] | None, sizes: Any) -> Findings:
    """See `lint`. Where a layer computes a probability above 0, it allows the pair."""
    from keras_headmask.retrofit.adapters import without_remat  # needs all of retrofit/
    from keras_headmask.retrofit.find import Found
    from keras_headmask.retrofit.made_up import plain
    from keras_headmask.retrofit.observe import watched

    if not isinstance(model, keras.Model):
        base.check_spec(model, "rule", "hm.lint(SPEC)")  # raises
    survey = Found(model)
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
        found = lint(spec, num_heads=entry.num_heads)  # which holds whatever the inputs hold
        for run in (x.probabilities for x in seen if x.path == entry.path):
            allowed = ops.convert_to_numpy(run) > 0
            mine = {name: x for name, x in marks.items() if x.shape[1] == allowed.shape[3]}
            found += _padding_seen(allowed, mine)
            # Made-up ids are all alike: what a rule makes of them says nothing.
            if inputs is not None or all(map(marks_padding, spec.inputs)):
                rest = (x for x in found if x.code != "dead-rows")
                found = Findings([*rest, *_dead_rows(spec, allowed, mine)])
            if inputs is not None or survey.zero_padded_inputs:
                given = {name: x for name, x in tensors.items() if name in spec.inputs}
                found += _end_id_pads(spec, given, mine)
        for finding in found:
            paths.setdefault(finding, []).append(entry.path)
    return Findings(x._replace(layers=tuple(of_layers)) for x, of_layers in paths.items())


def _unknown_leaves(spec: MaskSpec, given: _Arrays) -> list[MaskSpec]:
    """The leaves that read what is not given."""
    return [leaf for leaf in leaves(spec) if not leaf.inputs.keys() <= given.keys()]


def _length_for(spec: MaskSpec, num_heads: int) -> tuple[int, bool]:
    """A length at which every number of the rule matters, and whether it is not too long."""
    distance = farthest(spec)
    wanted = _UNKNOWN if distance is None else max(_SHORTEST, 2 * distance + 2)
    unknown = min(len(_unknown_leaves(spec, {})), _MOST_UNKNOWN)
    most = math.isqrt(_MOST_PAIRS // (num_heads << unknown))
    return min(wanted, most), wanted <= most


def _masks(spec: MaskSpec, num_heads: int, queries: int, keys: int, given: _Arrays) -> np.ndarray:
    """What `spec` allows, `(2, ..., 2, B, H, queries, keys)`.

    A leaf whose inputs are not given may allow anything: it has an axis of 2, true and false.
    """
    unknown, pairs = _unknown_leaves(spec, given), num_heads * queries * keys
    if len(unknown) > _MOST_UNKNOWN or pairs << len(unknown) > _MOST_PAIRS:
        found = f"{pairs} pairs of positions, and {len(unknown)} parts of the rule that read what"
        hint = "Pass fewer `queries`, or `mask_inputs` beside a spec."
        raise ValueError(f"{found} is not given, are too many. {hint}")
    values: dict[MaskSpec, np.ndarray] = {}
    for leaf in leaves(spec):
        if leaf in unknown:
            axes = [2 if other == leaf else 1 for other in unknown]
            values[leaf] = np.reshape([True, False], (*axes, 1, 1, 1, 1))
            continue
        read = {name: given[name] for name in leaf.inputs}
        mask = evaluation.make_mask(leaf, queries, keys, num_heads, read)
        values[leaf] = ops.convert_to_numpy(mask)
    batch = max(value.shape[-4] for value in values.values())
    result = np.zeros((2,) * len(unknown) + (batch, num_heads, queries, keys), bool)
    for rule, heads in head_groups(spec, num_heads):
        some = (..., list(heads), slice(None), slice(None))
        own = {leaf: x if x.shape[-3] == 1 else x[some] for leaf, x in values.items()}
        result[some] = rule.fold(own.__getitem__, np.logical_and, np.logical_or, np.logical_not)
    return result


def _of_rule(spec: MaskSpec, allowed: np.ndarray) -> Iterator[Finding]:
    """Rules that hide nothing, heads that are equal, inputs without effect.

    `allowed`: the mask without inputs, so that what is found holds whatever they hold.
    """
    at, of_heads = _AT.format(*allowed.shape[-2:]), np.moveaxis(allowed, -3, 0)
    groups = head_groups(spec, len(of_heads))
    for rule, heads in groups:
        if of_heads[heads[0]].all() and rule.kind != "full":
            yield Finding("hides-nothing", f"{rule!r} hides nothing {at}.", heads)
    for (one, heads), (other, more) in itertools.combinations(groups, 2):
        if (of_heads[heads[0]] == of_heads[more[0]]).all() and not of_heads[more[0]].all():
            message = f"{one!r} and {other!r} allow the same {at}."
            yield Finding("equal-heads", message, tuple(sorted(heads + more)))
    for name in spec.inputs:
        axes = [i for i, x in enumerate(_unknown_leaves(spec, {})) if name in x.inputs]
        if all((allowed.take(0, i) == allowed.take(1, i)).all() for i in axes):
            message = f"Whatever `{name}` holds, the rule allows the same {at}."
            yield Finding("input-changes-nothing", message)


def _dead_rows(spec: MaskSpec, allowed: np.ndarray, marks: _Arrays) -> Iterator[Finding]:
    """Real queries that see nothing. `allowed` `(B, H, T, S)`; `marks` `(B, S)`, real by true."""
    dead: Any = ~allowed.any(-1)
    for real in marks.values():
        dead = dead & real[:, None] if real.shape[1] == dead.shape[2] else dead
    by_rows: dict[tuple[int, ...], list[int]] = {}
    for head in np.flatnonzero(dead.any((0, 2))).tolist():
        rule, some = spec.for_head(head), np.flatnonzero(dead[:, head].any(0)).tolist()
        if rule.kind != "nothing":  # (`Nothing()` switches a head off)
            by_rows.setdefault(tuple(some), []).append(head)
    for rows, heads in by_rows.items():
        text = words.numbers_in_words(rows)
        text = text if len(text) < 60 else f"{rows[0]} to {rows[-1]} ({len(rows)} of them)"
        who = f"Query {text} sees" if len(rows) == 1 else f"Queries {text} see"
        found = f"{who} no key {_AT.format(*allowed.shape[2:])}: the output is 0."
        yield Finding("dead-rows", found, tuple(heads))


def _padding_seen(allowed: np.ndarray, marks: _Arrays) -> list[Finding]:
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


def _end_id_pads(spec: MaskSpec, given: _Arrays, marks: _Arrays) -> Iterator[Finding]:
    """Ids that end a part of the sequence, but occur at padding alone."""
    for leaf in leaves(spec):
        ends_parts = ids_of(leaf) and all(x.sides == BOTH for x in leaf.inputs.values())
        if ends_parts and not _unknown_leaves(leaf, given):
            ids: Any = side_of(given[next(iter(leaf.inputs))], -1)
            found = np.isin(ids, ids_of(leaf))
            real = [found & x for x in marks.values() if x.shape == found.shape]
            if real and found.any() and not np.logical_and.reduce(real).any():
                message = f"The ids that {leaf!r} looks for occur at padding alone: check them."
                yield Finding("end-id-pads", message)
