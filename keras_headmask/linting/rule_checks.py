"""Checks of a rule: what its positions say, whatever its inputs hold, or for the examples given."""

import functools
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import numpy as np

from keras_headmask.attention import tiles_python
from keras_headmask.attention.tuning import Tuning
from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import MOST_UNKNOWN, Subject
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec, joins, leaves

_MANY = 1024  # positions, to see what tiles skip
_FULL_COST, _FEW_ALLOWED = 0.95, 0.5  # shares of the score matrix


def of_positions(subject: Subject, hidden: Set[str] = frozenset()) -> Iterator[Finding]:
    """`hidden`: sides of the query, "before" and "after", that masks beside the rule hide."""
    if len(subject.unknown) > MOST_UNKNOWN:
        yield Finding(
            "info",
            "not-checked",
            f"The rule has {len(subject.unknown)} parts that read inputs, too many to try all that "
            "they may say.",
            "Pass examples of the inputs as `mask_inputs`.",
        )
        return
    yield from _dead(subject)
    yield from _unseen(subject)
    yield from _never_self(subject)
    yield from _open_sides(subject, hidden)
    yield from _clauses(subject)
    yield from _equal_to_default(subject)
    yield from _cost(subject)


def _dead(subject: Subject) -> Iterator[Finding]:
    """Heads that are off, and queries that see nothing."""
    alive = subject.possible.any(-1)  # (B, H, T)
    off = ~alive.any((0, 2))
    dead = ~alive
    if subject.padding is not None and subject.self_attention:
        dead = dead & subject.padding[:, None, :]  # what padding sees is nobody's concern
    for rule, heads in subject.groups:
        if silent := tuple(head for head in heads if off[head]):
            meant = rule.constant is False and not rule.children and not off.all()
            yield Finding(
                "info" if meant else "error",
                "head-off",
                "No query sees any key: the output is 0."
                + ("" if not off.all() else " So it is in every head."),
                "It is what Nothing() says."
                if meant
                else "Look for parts that exclude each other.",
                silent,
            )
        by_rows: dict[tuple[int, ...], list[int]] = {}
        for head in heads:
            rows = tuple(np.flatnonzero(dead[:, head].any(0)).tolist())
            if rows and not off[head]:
                by_rows.setdefault(rows, []).append(head)
        for rows, some in by_rows.items():
            examples = dead[:, some].any((1, 2))
            where = ""
            if subject.possible.shape[0] > 1:
                where = f" in {int(examples.sum())} of {len(examples)} examples"
            one = len(rows) == 1
            yield Finding(
                "warning",
                "dead-rows",
                f"{'Query' if one else 'Queries'} {_positions(rows)} {'sees' if one else 'see'} no "
                f"key{where}, so {'its' if one else 'their'} output is 0.",
                "Open at least one key to each query"
                + ("." if subject.is_cross else ", such as itself: rule | Window(0, 0)."),
                tuple(some),
                rows,
            )


def _unseen(subject: Subject) -> Iterator[Finding]:
    """Keys that no query sees by the rule's positions, whatever the data."""
    if subject.offset != 0:
        return  # the queries at hand are not all
    blind = subject if not subject.given else subject.without_data()
    unseen = ~blind.possible.any((0, 2))  # (H, S)
    active = blind.possible.any((0, 2, 3))
    everywhere = unseen[active].all(0) if active.any() else unseen.all(0) & False
    if everywhere.any():
        keys = tuple(np.flatnonzero(everywhere).tolist())
        yield Finding(
            "warning",
            "unseen-keys",
            f"{_keys(keys)} seen by no query, in no head.",
            "Widen the rule, or give those positions to the model no more.",
            positions=keys,
        )
    for _, heads in blind.groups:
        rest = unseen[heads[0]] & ~everywhere
        if active[heads[0]] and rest.any():
            keys = tuple(np.flatnonzero(rest).tolist())
            yield Finding(
                "info",
                "unseen-keys",
                f"{_keys(keys)} seen by no query of these heads.",
                "If that is not meant, widen the rule.",
                heads,
                keys,
            )


def _never_self(subject: Subject) -> Iterator[Finding]:
    if not subject.self_attention:
        return
    possible = subject.possible
    active = possible.any((0, 2, 3))
    never = ~possible.diagonal(axis1=2, axis2=3).any((0, 2)) & active
    everywhere = bool((never == active).all())
    for _, heads in subject.groups:
        if some := tuple(head for head in heads if never[head]):
            yield Finding(
                "warning" if everywhere else "info",
                "never-self",
                "No query may attend to itself" + (", in no head." if everywhere else "."),
                "If that is not meant, add `| Window(0, 0)`.",
                some,
            )


def _open_sides(subject: Subject, hidden: Set[str]) -> Iterator[Finding]:
    """Windows bounded on one side alone, where nothing else in the rule bounds the other."""
    found: dict[MaskSpec, list[int]] = {}
    for rule, heads in subject.groups:
        for leaf in leaves(rule):
            if leaf.open_side and _stays_open(rule, leaf) and _matters(subject, rule, heads, leaf):
                found.setdefault(leaf, []).extend(heads)
    for leaf, heads in found.items():
        side, _, meant = leaf.open_side
        if side in hidden:
            continue
        ways = " or ".join(map(repr, meant)) + (", which is causal" if len(meant) == 1 else "")
        yield Finding(
            "info",
            "open-side",
            f"{leaf!r} leaves `{side}` open: every token {side} the query is seen, too.",
            f"If that is not meant, write {ways}.",
            tuple(sorted(heads)),
        )


def hidden_sides(outside: Any, lengths: tuple[int, int] | None) -> Set[str]:
    """Which side of the query a mask beside the rule hides, as a causal mask does."""
    if outside is True or lengths is None:
        return frozenset()
    pairs = np.broadcast_to(outside, (*outside.shape[:2], *lengths))
    open_sides = {"after": np.triu(pairs, 1), "before": np.tril(pairs, -1)}
    return {side for side, part in open_sides.items() if not part.any()}


class _Sides(NamedTuple):
    """Whether a part of a rule holds a leaf, leaves it open on its side, and closes that side."""

    holds: bool
    stays_open: bool
    closes: bool


def _stays_open(rule: MaskSpec, leaf: MaskSpec) -> bool:
    """Whether `leaf` stands somewhere in `rule` where no other part of an `&` closes its side."""

    def of_leaf(spec: MaskSpec) -> _Sides:
        return _Sides(spec == leaf, spec == leaf, spec.closes(leaf.open_side.side))

    def both(a: _Sides, b: _Sides) -> _Sides:
        stays_open = (a.stays_open and not b.closes) or (b.stays_open and not a.closes)
        return _Sides(a.holds or b.holds, stays_open, a.closes or b.closes)

    def either(a: _Sides, b: _Sides) -> _Sides:
        return _Sides(a.holds or b.holds, a.stays_open or b.stays_open, a.closes and b.closes)

    def neither(a: _Sides) -> _Sides:
        return _Sides(a.holds, a.holds, False)  # under `~` nothing is known to be closed

    return rule.fold(of_leaf, both, either, neither).stays_open


def _matters(subject: Subject, rule: MaskSpec, heads: tuple[int, ...], leaf: MaskSpec) -> bool:
    """Whether `rule` would allow something else, were the open side of `leaf` closed."""
    other = _replaced(rule, leaf, leaf.open_side.closed)
    with_data = not subject.has_room or sum(bool(x.inputs) for x in leaves(rule)) > MOST_UNKNOWN
    masks_of = subject.answers(rule, heads, with_data, among=other)
    pairs = zip(masks_of(rule), masks_of(other), strict=True)
    return any(bool((a != b).any()) for a, b in pairs)


def _replaced(spec: MaskSpec, old: MaskSpec, new: MaskSpec) -> MaskSpec:
    """`spec`, free of `PerHead`, with the leaf `new` for `old`."""
    if spec == old:
        return new
    return spec.with_children([_replaced(child, old, new) for child in spec.children])


def _without(spec: MaskSpec, join: MaskSpec, number: int) -> MaskSpec:
    """`spec` without part `number` of `join`, which is one of its nodes."""
    if spec is join:
        return join.with_children([part for i, part in enumerate(join.specs) if i != number])
    return spec.with_children([_without(child, join, number) for child in spec.children])


def _clauses(subject: Subject) -> Iterator[Finding]:
    """Parts of `&` and `|`, as written, without which every head allows the same."""
    inside = [(set(map(id, joins(subject.spec, heads[0]))), heads) for _, heads in subject.groups]
    for join in {id(join): join for join in joins(subject.spec)}.values():
        groups = [heads for of_heads, heads in inside if id(join) in of_heads]
        for i, part in enumerate(join.specs if groups else ()):
            without = _without(subject.spec, join, i)
            always = subject.has_room and all(
                _same(subject, heads, without, with_data=False) for heads in groups
            )
            if not always and (
                subject.chosen or not all(_same(subject, heads, without) for heads in groups)
            ):
                continue
            of = f" of {subject.spec!r}" if join is not subject.spec else ""
            where = "" if always else f" at {subject.queries} x {subject.keys} positions"
            if not always and subject.given:
                where += ", for these inputs"
            yield Finding(
                "warning" if always else "info",
                "clause-changes-nothing",
                f"Without {part!r} in {join!r}{of} the same is allowed{where}.",
                "Leave it out, or mend what it was meant to say."
                if always
                else "Look again with longer sequences, or with other examples.",
                tuple(sorted(head for heads in groups for head in heads)),
            )


def _same(
    subject: Subject, heads: tuple[int, ...], without: MaskSpec, with_data: bool = True
) -> bool:
    masks_of = subject.answers(subject.spec.for_head(heads[0]), heads, with_data)
    pairs = zip(masks_of(subject.spec), masks_of(without), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)


def _equal_to_default(subject: Subject) -> Iterator[Finding]:
    named = set(words.named_heads(subject.spec))
    default = subject.spec.for_head(max(named, default=0) + 1)
    for rule, heads in subject.groups:
        some = tuple(head for head in heads if head in named)
        if not some:
            continue
        equal = rule == default
        if not equal and subject.has_room:
            unknown = sum(bool(leaf.inputs) for leaf in leaves(rule & default))
            if unknown <= MOST_UNKNOWN:
                answers = subject.answers(rule, heads, with_data=False, among=default)
                pairs = zip(answers(rule), answers(default), strict=True)
                equal = all(bool((a == b).all()) for a, b in pairs)
        if equal:
            yield Finding(
                "warning",
                "equals-default",
                f"The rule {rule!r} allows what the heads that are not named may see.",
                "Leave it out, or say what sets it apart.",
                some,
            )


def _cost(subject: Subject) -> Iterator[Finding]:
    """Rules that allow few pairs, but some in every tile."""
    size = max(_MANY, subject.room)
    tile, block = Tuning().local_tile, Tuning().python_block
    many = Subject(subject.spec, subject.heads, size, size)
    for rule, heads in subject.groups:
        if tiles_python.plan(rule, size, size, 0, tile, block).share(size) < _FULL_COST:
            continue
        allowed = functools.reduce(np.logical_or, many.answers(rule, heads)(rule)).mean()
        if 0 < allowed <= _FEW_ALLOWED:
            yield Finding(
                "info",
                "full-cost",
                f"At {size} positions at most {allowed:.0%} of the pairs are allowed, but they lie "
                "in every tile, so no work is skipped.",
                "Rules of windows and blocks leave whole tiles out; a stride or small blocks do "
                "not.",
                heads,
            )


def _positions(numbers: tuple[int, ...]) -> str:
    text = words.numbers_in_words(numbers)
    return text if len(text) < 60 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"


def _keys(numbers: tuple[int, ...]) -> str:
    return f"Key {numbers[0]} is" if len(numbers) == 1 else f"Keys {_positions(numbers)} are"
