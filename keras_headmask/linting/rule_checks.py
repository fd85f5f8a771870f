"""Checks of a rule: what its positions say, whatever its inputs hold, or for the examples given."""

from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from keras_headmask.attention import planner
from keras_headmask.attention.tuning import Tuning
from keras_headmask.linting.findings import Finding
from keras_headmask.linting.subject import MOST_UNKNOWN, Subject, numbers_of
from keras_headmask.rules import config, words
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.per_head import joins
from keras_headmask.rules.protocol import OpenSide
from keras_headmask.rules.spec_laws import broken_in_json, broken_in_masks

_MANY = 1024  # positions, to see what tiles skip, and to try a spec of a user's own
_FULL_COST, _FEW_ALLOWED = 0.95, 0.5  # shares of all pairs


def check_positions(subject: Subject, hidden: Set[str] = frozenset()) -> Iterator[Finding]:
    """`hidden`: sides of the query, "before" and "after", that masks beside the rule hide."""
    yield from _own_kinds(subject)
    if len(subject.unknown) > MOST_UNKNOWN:
        parts = f"The rule has {len(subject.unknown)} parts that read inputs"
        message = f"{parts}, too many to try every answer of each."
        way_out = "Pass examples of the inputs as `mask_inputs`."
        yield Finding("info", "not-checked", message, way_out)
        return
    yield from _dead(subject)
    yield from _unseen(subject)
    yield from _never_self(subject)
    yield from _open_sides(subject, hidden)
    yield from _clauses(subject)
    yield from _equal_to_default(subject)
    yield from _cost(subject)


def _own_kinds(subject: Subject) -> Iterator[Finding]:
    """Kinds of a user's own that break a law of `hm.testing.check_spec`."""
    for leaf in leaves(subject.spec):
        if config.is_built_in(type(leaf)):
            continue
        broken = list(broken_in_json(leaf)) if config.is_registered(type(leaf)) else []
        queries, keys = subject.queries, subject.keys
        if not leaf.inputs:  # (examples are tried whole)
            queries, keys = min(queries, _MANY), min(keys, _MANY)
        if subject.has(leaf) and queries * keys <= _MANY**2:
            sizes = queries, keys, subject.heads
            broken += broken_in_masks(leaf, *sizes, subject.given, subject.offset)
        for message, way_out in broken[:1]:
            yield Finding("error", "unsound-spec", message, way_out)


def _dead(subject: Subject) -> Iterator[Finding]:
    """Heads that are off, and queries that see nothing."""
    dead = ~subject.possible.any(-1)  # (B, H, T)
    off = dead.all((0, 2))
    if subject.padding is not None and subject.self_attention:
        dead = dead & subject.padding[:, None, :]  # what padding sees does not matter
    for rule, heads in subject.groups:
        if silent := tuple(head for head in heads if off[head]):
            severity, way_out = "error", "Look for parts that exclude each other."
            if rule.constant is False and not rule.children and not off.all():
                severity, way_out = "info", "It is what Nothing() says."
            message = "No query sees any key: the output is 0."
            message += " So it is in every head." if off.all() else ""
            yield Finding(severity, "head-off", message, way_out, silent)
        by_rows: dict[tuple[int, ...], list[int]] = {}
        for head in heads:
            rows = numbers_of(dead[:, head].any(0))
            if rows and not off[head]:
                by_rows.setdefault(rows, []).append(head)
        for rows, some in by_rows.items():
            examples = dead[:, some].any((1, 2))
            where = f" in {examples.sum()} of {len(examples)} examples" if len(examples) > 1 else ""
            message = f"Queries {_positions(rows)} see no key{where}, so their output is 0."
            if len(rows) == 1:
                message = f"Query {rows[0]} sees no key{where}, so its output is 0."
            way_out = "Open at least one key to each query"
            way_out += "." if subject.is_cross else ", such as itself: rule | Window(0, 0)."
            yield Finding("warning", "dead-rows", message, way_out, tuple(some), rows)


def _unseen(subject: Subject) -> Iterator[Finding]:
    """Keys that no query sees by the rule's positions, whatever the data."""
    if subject.offset != 0:
        return  # there are other queries than these
    possible = subject.possible
    if subject.given:  # the same lengths, where the inputs may hold anything
        sizes = (subject.heads, subject.queries, subject.keys)
        possible = Subject(subject.spec, *sizes, is_cross=subject.is_cross).possible
    unseen, active = ~possible.any((0, 2)), possible.any((0, 2, 3))  # (H, S), (H,)
    everywhere = unseen[active].all(0) & active.any()
    if keys := numbers_of(everywhere):
        message = f"{_keys(keys)} seen by no query of any head."
        way_out = "Widen the rule, or stop passing those positions to the model."
        yield Finding("warning", "unseen-keys", message, way_out, positions=keys)
    for _, heads in subject.groups:
        keys = numbers_of(unseen[heads[0]] & ~everywhere)
        if active[heads[0]] and keys:
            message = f"{_keys(keys)} seen by no query of these heads."
            way_out = "If that is not meant, widen the rule."
            yield Finding("info", "unseen-keys", message, way_out, heads, keys)


def _never_self(subject: Subject) -> Iterator[Finding]:
    if not subject.self_attention:
        return
    active = subject.possible.any((0, 2, 3))
    never = ~subject.possible.diagonal(axis1=2, axis2=3).any((0, 2)) & active
    severity, where = ("info", ".") if (never != active).any() else ("warning", " in any head.")
    for _, heads in subject.groups:
        if some := tuple(head for head in heads if never[head]):
            message = f"No query may attend to itself{where}"
            way_out = "If that is not meant, add `| Window(0, 0)`."
            yield Finding(severity, "never-self", message, way_out, some)


def _open_sides(subject: Subject, hidden: Set[str]) -> Iterator[Finding]:
    """Windows bounded on one side alone, where nothing else in the rule bounds the other."""
    open_sides: dict[MaskSpec, tuple[OpenSide, list[int]]] = {}
    for rule, heads in subject.groups:
        with_data = not subject.is_enough or not _few_readers(rule)
        for leaf in leaves(rule):
            side = leaf.sampling.open_side
            if side is None or side.side in hidden or not _stays_open(rule, leaf, side.side):
                continue
            closed = _replaced(rule, leaf, side.closed)
            if not subject.same(rule, closed, heads, with_data=with_data):
                open_sides.setdefault(leaf, (side, []))[1].extend(heads)
    for leaf, ((name, _, meant), some) in open_sides.items():
        instead = " or ".join(map(repr, meant)) + (", which is causal" if len(meant) == 1 else "")
        message = f"{leaf!r} leaves `{name}` open: every token {name} the query is seen, too."
        way_out = f"If that is not meant, write {instead}."
        yield Finding("info", "open-side", message, way_out, tuple(sorted(some)))


def hidden_sides(outside: Any, lengths: tuple[int, int] | None) -> Set[str]:
    """Which side of the query a mask beside the rule hides, as a causal mask does."""
    if outside is True or lengths is None:
        return frozenset()
    pairs = np.broadcast_to(outside, (*outside.shape[:2], *lengths))
    open_sides = {"after": np.triu(pairs, 1), "before": np.tril(pairs, -1)}
    return {side for side, part in open_sides.items() if not part.any()}


def _stays_open(rule: MaskSpec, leaf: MaskSpec, side: str) -> bool:
    """Whether `leaf` stands somewhere in `rule` where no other part of an `&` closes its side.

    Of each part: whether it holds the leaf, leaves it open, and closes the side. Under `~` nothing
    is known to be closed.
    """
    _, stays_open, _ = rule.fold(
        lambda spec: (spec == leaf, spec == leaf, side in spec.sampling.closes),
        lambda a, b: (a[0] or b[0], (a[1] and not b[2]) or (b[1] and not a[2]), a[2] or b[2]),
        lambda a, b: (a[0] or b[0], a[1] or b[1], a[2] and b[2]),
        lambda a: (a[0], a[0], False),
    )
    return stays_open


def _replaced(spec: MaskSpec, old: MaskSpec, new: Any) -> MaskSpec:
    """`spec` with `new` for `old`, which is one of its nodes or equal to one of its leaves."""
    if spec is old or (spec == old and not spec.children):
        return new
    return spec.with_children([_replaced(child, old, new) for child in spec.children])


def _clauses(subject: Subject) -> Iterator[Finding]:
    """Parts of `&` and `|`, as written, without which every head allows the same."""
    spec = subject.spec
    inside = [(set(map(id, joins(spec, heads[0]))), heads) for _, heads in subject.groups]
    for join in {id(join): join for join in joins(spec)}.values():
        groups = [heads for of_heads, heads in inside if id(join) in of_heads]
        for i, part in enumerate(join.children if groups else ()):
            rest = join.with_children(join.children[:i] + join.children[i + 1 :])
            without = _replaced(spec, join, rest)
            severity, where, way_out = "warning", "", "Leave it out, or correct it."
            if not (subject.is_enough and subject.same(spec, without, *groups, with_data=False)):
                if subject.is_chosen or not subject.same(spec, without, *groups):
                    continue
                severity, where = "info", f" at {subject.queries} x {subject.keys} positions"
                where += ", for these inputs" if subject.given else ""
                way_out = "Look again with longer sequences, or with other examples."
            of = f" of {spec!r}" if join is not spec else ""
            message = f"Without {part!r} in {join!r}{of} the same is allowed{where}."
            some = tuple(sorted(head for heads in groups for head in heads))
            yield Finding(severity, "clause-changes-nothing", message, way_out, some)


def _equal_to_default(subject: Subject) -> Iterator[Finding]:
    named = set(words.named_heads(subject.spec))
    default = subject.spec.for_head(max(named, default=0) + 1)
    for rule, heads in subject.groups:
        some = tuple(head for head in heads if head in named)
        is_equal = rule == default
        if some and not is_equal and subject.is_enough and _few_readers(rule & default):
            is_equal = subject.same(rule, default, heads, with_data=False)
        if some and is_equal:
            message = f"The rule {rule!r} allows what the heads that are not named may see."
            way_out = "Leave it out, or say what sets it apart."
            if any(part.constant for part in rule.children):
                way_out = (
                    "One part allows everything, so `|` does. Join rules by head with `&`: a head "
                    "that one of them does not name then keeps the rule of the other."
                )
            yield Finding("warning", "equals-default", message, way_out, some)


def _cost(subject: Subject) -> Iterator[Finding]:
    """Rules that allow few pairs, but some in every tile."""
    size = max(_MANY, subject.enough)
    tile, block = Tuning().local_tile, Tuning().block
    many = Subject(subject.spec, subject.heads, size, size)
    for rule, heads in subject.groups:
        if planner.plan(rule, size, size, 0, tile, block).share(size) < _FULL_COST:
            continue
        allowed = many.possible_for(rule, heads).mean()
        if 0 < allowed <= _FEW_ALLOWED:
            share = f"At {size} positions at most {allowed:.0%} of the pairs are allowed"
            message = f"{share}, but they lie in every tile, so no work is skipped."
            way_out = "Windows and blocks leave whole tiles out; a stride or small blocks do not."
            yield Finding("info", "full-cost", message, way_out, heads)


def _few_readers(rule: MaskSpec) -> bool:
    """Whether every answer of its leaves can be tried."""
    return sum(bool(leaf.inputs) for leaf in leaves(rule)) <= MOST_UNKNOWN


def _keys(numbers: tuple[int, ...]) -> str:
    return f"Key {numbers[0]} is" if len(numbers) == 1 else f"Keys {_positions(numbers)} are"


def _positions(numbers: tuple[int, ...]) -> str:
    text = words.numbers_in_words(numbers)
    return text if len(text) < 60 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"
