"""Which heads obey one rule. Nothing here imports the specs."""

from collections.abc import Iterator
from typing import Any

from keras_headmask.rules.fields import whole_number

_MOST_HEADS = 100_000  # they are visited one by one


def named_heads(spec: Any) -> Iterator[int]:
    """Every head that `spec` numbers, in any `PerHead` of it."""
    if spec.kind == "per_head":
        yield from (head for head, _ in spec.heads)
    for child in spec.children:
        yield from named_heads(child)


def check_heads(spec: Any, num_heads: int, num_key_heads: int | None = None) -> None:
    """Every head that `spec` names must exist, also one whose rule equals the default.

    `num_key_heads`: of keys and values, where query heads share them.
    """
    if whole_number(num_heads, "num_heads", at_least=1, any_size=True) > _MOST_HEADS:
        raise ValueError(
            f"`num_heads` must be at most {_MOST_HEADS}. Received: {num_heads}. Pass the number of "
            "heads of the attention layer."
        )
    exist, hint = f"there are {num_heads} heads, numbered 0 to {num_heads - 1}", ""
    if num_heads == 1:
        exist, hint = "there is one head, numbered 0", " Pass `num_heads=` if there are more."
    elif num_key_heads not in (None, num_heads):
        exist = f"there are {num_heads} query heads, numbered 0 to {num_heads - 1}"
        hint = f" A rule names query heads; {num_key_heads} of keys and values serve them."
    for head in named_heads(spec):
        if head >= num_heads:
            raise ValueError(
                f"The mask spec names head {head}, but {exist}. Received: {spec!r}.{hint}"
            )


def head_groups(spec: Any, num_heads: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Each rule that some head obeys, free of `PerHead`, with the heads that obey it."""
    check_heads(spec, num_heads)
    groups: dict[Any, list[int]] = {}
    for head in range(num_heads):
        groups.setdefault(spec.for_head(head), []).append(head)
    return [(rule, tuple(heads)) for rule, heads in groups.items()]


def restricts(spec: Any, num_heads: int) -> bool:
    """Whether some head obeys another rule than a leaf that hides nothing."""
    return any(rule.children or not rule.constant for rule, _ in head_groups(spec, num_heads))
