"""A rule in plain English.

Each spec says by `in_words` what a token sees; here the parts are put together, and the heads.
Nothing here imports the specs, so that a spec can describe itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from keras_headmask.rules import config


class Words(NamedTuple):
    """What a token sees, as a phrase: "itself", "the first 4 tokens"; and what kind of phrase.

    `condition` is set where the rule asks something of the query alone: "if its own `x` is set".
    `compound` phrases are bracketed inside another. `hidden` is what a complement leaves out.
    """

    phrase: str
    condition: str = ""
    compound: bool = False
    hidden: str = ""

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
) -> tuple[list[tuple[Any, tuple[int, ...]]], int | None]:
    """Each rule with the heads that obey it, those that see everything last.

    Without `num_heads` one head stands for all that `spec` does not name: it is returned, too, and
    its group comes last.
    """
    named = max(named_heads(spec), default=-1) + 1
    if num_heads is None:
        groups, others = grouped(spec, named + 1), named
    else:
        config.number_of_heads(num_heads)
        if named > num_heads:
            raise ValueError(
                f"The mask spec names head {named - 1}, but there are {num_heads} heads, numbered "
                f"0 to {num_heads - 1}. Received: {spec!r}."
            )
        groups, others = grouped(spec, num_heads), None
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
    parts: list[str] = []
    for run in runs(numbers):
        parts.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    return listed(parts, "and")


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Whole numbers in rising order, cut wherever one is left out.

    >>> runs([0, 2, 3, 4])
    [[0], [2, 3, 4]]
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def words(spec: Any) -> Words:
    """What a token sees under `spec`, which holds no `PerHead`."""
    said = spec.in_words()
    owner = next(cls for cls in type(spec).__mro__ if "in_words" in vars(cls))
    if owner is not type(spec) and getattr(owner, "kind", "") and config.is_registered(owner):
        said = None  # the words of another kind, inherited by a class that may mean anything
    return said if isinstance(said, Words) else Words(said or f"what {spec!r} allows")


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
    return rule.constant is True


def grouped(spec: Any, num_heads: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Each rule that some head obeys, and its heads."""
    groups: dict[Any, list[int]] = {}
    for head in range(num_heads):
        groups.setdefault(spec.for_head(head), []).append(head)
    return [(rule, tuple(heads)) for rule, heads in groups.items()]


# --- Joins: the same words for the same rule, so parts stand in an order of their own -------------


_ORDER = (  # in which parts are told; others come last
    *("full", "nothing", "window", "chunk", "same_segment", "same_sentence", "keys", "key_in"),
    *("key_flag", "random_blocks", "mask_input", "or", "and", "not"),
    *("queries", "query_flag", "query_in"),
)


def _in_order(specs: tuple) -> list[Words]:
    """The words of parts, in an order that does not depend on how they were written."""
    order = {kind: i for i, kind in enumerate(_ORDER)}
    told = [(order.get(spec.kind, len(order)), words(spec)) for spec in dict.fromkeys(specs)]
    return [said for _, said in sorted(told, key=lambda pair: (pair[0], pair[1].phrase))]


def of_and(specs: tuple) -> Words:
    """ "A; of these only B, but not C, if D": a part that asks of the query alone comes last."""
    nouns, negated, conditions = [], [], []
    for said in _in_order(specs):
        if said.condition:
            conditions.append(said.condition)
        elif said.hidden:
            negated.append(said.hidden)
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


def of_or(specs: tuple) -> Words:
    return Words(", plus ".join(said.inner for said in _in_order(specs)), compound=True)


def of_not(spec: Any) -> Words:
    said = words(spec)
    if said.condition.startswith("if "):
        return of_the_query(f"unless {said.condition.removeprefix('if ')}")
    return Words(f"all but {said.those}", compound=True, hidden=said.those)


# --- Phrases of leaves ----------------------------------------------------------------------------


def of_the_query(condition: str) -> Words:
    """Of a spec that asks something of the query alone: "if it stands at position 3"."""
    return Words(f"every token, {condition}", condition, compound=condition.startswith("unless"))


def tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''}"


def ids_in_words(ids: tuple[int, ...]) -> str:
    return listed(list(map(str, ids)), "or")


def listed(parts: list[str], conjunction: str) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = parts
    return f"{', '.join(most)} {conjunction} {last}" if most else last
