"""A rule in plain English.

Words are found by the permanent name of a kind, so nothing here imports the specs, and a spec can
describe itself. A kind that has none here speaks by its own `in_words`, or shows its `repr`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_headmask.rules import config


class Words(NamedTuple):
    """What a token sees, as a phrase: "itself", "the first 4 tokens"; and what kind of phrase.

    `condition` is set where the rule asks something of the query alone: "if its own `x` is set".
    `compound` phrases are bracketed inside another.
    """

    phrase: str
    condition: str = ""
    compound: bool = False

    @property
    def inner(self) -> str:
        """The phrase inside another."""
        return f"({self.phrase})" if self.compound else self.phrase

    @property
    def those(self) -> str:
        """The phrase after "only", "not" or "all but"."""
        phrase = self.inner
        if phrase.startswith("every token "):
            phrase = "the tokens " + phrase.removeprefix("every token ")
        return phrase


def describe(spec: Any, num_heads: int | None = None) -> str:
    """See `MaskSpec.describe`."""
    return " ".join(sentences(spec, num_heads))


def sentences(spec: Any, num_heads: int | None = None) -> list[str]:
    """A sentence for each group of heads that obey one rule."""
    groups, others = ordered_groups(spec, num_heads)
    if len(groups) == 1:
        return [f"A token sees {words(groups[0][0]).phrase}."]
    found: list[str] = []
    for rule, heads in groups:
        title = "All other heads" if others in heads else heads_in_words(heads)
        subject = "" if found else "a token sees "
        found.append(f"{title}: {subject}{words(rule).phrase}.")
    return found


def ordered_groups(
    spec: Any, num_heads: int | None
) -> tuple[list[tuple[Any, list[int]]], int | None]:
    """Each rule with the heads that obey it, those that see everything last.

    Without `num_heads` one head stands for all that `spec` does not name: it is returned, too, and
    its group comes last.
    """
    named = max(named_heads(spec), default=-1) + 1
    if num_heads is None:
        groups, others = _groups(spec, named + 1), named
    else:
        config.number_of_heads(num_heads)
        if named > num_heads:
            raise ValueError(
                f"The mask spec names head {named - 1}, but there are {num_heads} heads, numbered "
                f"0 to {num_heads - 1}. Received: {spec!r}."
            )
        groups, others = _groups(spec, num_heads), None
    groups.sort(key=lambda group: (others in group[1], sees_everything(group[0])))
    return groups, others


def heads_in_words(heads: tuple[int, ...] | list[int]) -> str:
    """
    >>> heads_in_words([0, 2, 3, 4])
    'Heads 0 and 2 to 4'
    """
    return f"Head{'s' if len(heads) > 1 else ''} {numbers_in_words(heads)}"


def numbers_in_words(numbers: tuple[int, ...] | list[int]) -> str:
    """Whole numbers in rising order, runs of three and more folded."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    return _listed(parts, "and")


def words(spec: Any) -> Words:
    """What a token sees under `spec`, which holds no `PerHead`."""
    if not config.is_registered(type(spec)):  # a subclass that has only inherited its kind
        return _own_words(spec)
    return _WORDS.get(spec.kind, _own_words)(spec)


def named_heads(spec: Any) -> Iterator[int]:
    """Every head that `spec` numbers, in any `PerHead` of it."""
    if spec.kind == "per_head":
        yield from (head for head, _ in spec.heads)
    for child in spec.children:
        yield from named_heads(child)


def enough_heads(spec: Any) -> int:
    """So many that each head `spec` numbers is among them, and one that stands for the rest."""
    return max(named_heads(spec), default=-1) + 2


def sees_everything(rule: Any) -> bool:
    """Whether `rule` hides nothing. Heads under such a rule come last wherever heads are listed."""
    return rule.kind == "full"


def _groups(spec: Any, num_heads: int) -> list[tuple[Any, list[int]]]:
    groups: dict[Any, list[int]] = {}
    for head in range(num_heads):
        groups.setdefault(spec.for_head(head), []).append(head)
    return list(groups.items())


def _own_words(spec: Any) -> Words:
    return Words(spec.in_words() or f"what {spec!r} allows")


# --- Joins: the same words for the same rule, so parts stand in an order of their own -------------


def _parts(spec: Any) -> list[Any]:
    """Parts in an order that does not depend on how they were written."""
    order = {kind: i for i, kind in enumerate(_WORDS)}
    unique = dict.fromkeys(spec.specs)
    return sorted(unique, key=lambda s: (order.get(s.kind, len(order)), words(s).phrase))


def _and(spec: Any) -> Words:
    """ "A; of these only B, but not C, if D": a part that asks of the query alone comes last."""
    nouns, negated, conditions = [], [], []
    for part in _parts(spec):
        said = words(part)
        if said.condition:
            conditions.append(said.condition)
        elif part.kind == "not":
            negated.append(words(part.spec).those)
        else:
            nouns.append(said.those if nouns else said.inner)
    if nouns:
        text = "; of these only ".join(nouns) + "".join(f", but not {n}" for n in negated)
    elif negated:
        text = "all but " + "".join(
            f"{', and not ' if i else ''}{n}" for i, n in enumerate(negated)
        )
    else:
        text = "every token"
    among = bool(nouns or negated)
    joint = ", but only " if among else ", "  # so that `Full() & ...` has words of its own
    asked = [condition for condition in conditions if condition.startswith("if ")]
    if asked:
        text += joint + " and ".join(asked)
    refused = [c.removeprefix("unless ") for c in conditions if c not in asked]
    if refused:
        text += (", but not if " if among else ", unless ") + " or ".join(refused)
    return Words(text, compound=True)


def _or(spec: Any) -> Words:
    return Words(", plus ".join(words(part).inner for part in _parts(spec)), compound=True)


def _not(spec: Any) -> Words:
    said = words(spec.spec)
    if said.condition.startswith("if "):
        return _of_the_query(f"unless {said.condition.removeprefix('if ')}")
    return Words(f"all but {said.those}", compound=True)


# --- Leaves ---------------------------------------------------------------------------------------


def _of_the_query(condition: str) -> Words:
    return Words(f"every token, {condition}", condition, compound=condition.startswith("unless"))


def _window(spec: Any) -> Words:
    before, after = spec.before, spec.after
    if before is None and after is None and spec.step > 1:
        return Words(f"every token at a distance that is a multiple of {spec.step}")
    if before is None and after is None:
        text = "every token, at whatever distance"
    elif before is not None and before < 0:
        text = f"{_places(-before, after)} after it"
    elif after is not None and after < 0:
        text = f"{_places(-after, before)} before it"
    elif before == after:
        text = f"itself and {_tokens(before)} on each side" if before else "itself alone"
    else:
        sides = [
            "" if count == 0 else f"{'every token' if count is None else _tokens(count)} {where} it"
            for count, where in ((before, "before"), (after, "after"))
        ]
        said = ["itself", *filter(None, sides)]
        if None in (before, after) and len(said) > 2:  # the open side is easily overlooked
            said.insert(0, said.pop(1 if before is None else 2))
        text = _listed(said, "and")
    if spec.step > 1:
        return Words(f"{text}, at distances that are multiples of {spec.step}", compound=True)
    return Words(text)


def _places(first: int, last: int | None) -> str:
    """Places off the query, in one direction."""
    if last is None:
        return f"every token {first} or more places"
    if first == last:
        return f"the token {first} place{'s' if first > 1 else ''}"
    return f"the tokens {first} to {last} places"


def _chunk(spec: Any) -> Words:
    own = f"its own block of {_tokens(spec.size)}"
    if spec.before == spec.after:
        return Words(f"{own} and {_blocks(spec.before)} on each side" if spec.before else own)
    sides = [
        f"{_blocks(count)} {where} it"
        for count, where in ((spec.before, "before"), (spec.after, "after"))
        if count
    ]
    return Words(_listed([own, *sides], "and"))


def _keys(spec: Any) -> Words:
    if spec.stop is None:
        return Words(f"every token from position {spec.start} on")
    count = spec.stop - spec.start
    if spec.start == 0:
        return Words("the first token" if count == 1 else f"the first {count} tokens")
    if count == 1:
        return Words(f"the token at position {spec.start}")
    return Words(f"the tokens at positions {spec.start} to {spec.stop - 1}")


def _queries(spec: Any) -> Words:
    if spec.stop is None:
        return _of_the_query(f"if it stands at position {spec.start} or later")
    if spec.stop == spec.start + 1:
        return _of_the_query(f"if it stands at position {spec.start}")
    return _of_the_query(f"if it stands at positions {spec.start} to {spec.stop - 1}")


def _same_sentence(spec: Any) -> Words:
    where = "" if spec.input == "token_ids" else f" in `{spec.input}`"
    ends = f"sentences{where} end with token {_ids(spec.end_ids)}"
    return Words(f"its own sentence ({ends})")


def _key_flag(spec: Any) -> Words:
    if spec.input == "padding_mask":  # the name that recipes.padding and KerasHub give it
        return Words("every token that `padding_mask` does not hide")
    return Words(f"every token whose `{spec.input}` is set")


def _random_blocks(spec: Any) -> Words:
    drawn = f"each open with probability {spec.density!r}, seed {spec.seed}"
    return Words(f"random blocks of {_tokens(spec.size)} ({drawn})")


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''}"


def _ids(ids: tuple[int, ...]) -> str:
    return _listed(list(map(str, ids)), "or")


def _listed(parts: list[str], conjunction: str) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = parts
    return f"{', '.join(most)} {conjunction} {last}" if most else last


_WORDS = {  # in the order in which parts of a rule are told
    "full": lambda spec: Words("every token"),
    "nothing": lambda spec: Words("nothing"),
    "window": _window,
    "chunk": _chunk,
    "same_segment": lambda spec: Words(f"the tokens with its own id in `{spec.input}`"),
    "same_sentence": _same_sentence,
    "keys": _keys,
    "key_in": lambda spec: Words(f"every token whose `{spec.input}` is {_ids(spec.ids)}"),
    "key_flag": _key_flag,
    "random_blocks": _random_blocks,
    "mask_input": lambda spec: Words(f"what the mask `{spec.input}` allows"),
    "or": _or,
    "and": _and,
    "not": _not,
    "queries": _queries,
    "query_flag": lambda spec: _of_the_query(f"if its own `{spec.input}` is set"),
    "query_in": lambda spec: _of_the_query(f"if its own `{spec.input}` is {_ids(spec.ids)}"),
}
