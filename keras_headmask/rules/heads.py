"""Which heads obey one rule. Nothing here imports the specs."""

from typing import Any

from keras_headmask.rules import config, words


def check_heads(spec: Any, num_heads: int) -> None:
    """Every head that `spec` names must exist, also one whose rule equals the default."""
    for child in spec.children:
        check_heads(child, num_heads)
    beyond = [head for head in words.named_heads(spec) if head >= num_heads]
    if beyond:  # of its own: the children have been looked at
        raise ValueError(
            f"The mask spec names head {beyond[0]}, but there are {num_heads} heads, numbered "
            f"0 to {num_heads - 1}. Received: {spec!r}."
        )


def head_groups(spec: Any, num_heads: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Each rule that some head obeys, free of `PerHead`, with the heads that obey it."""
    config.number_of_heads(num_heads)
    check_heads(spec, num_heads)
    return words.grouped(spec, num_heads)


def restricts(spec: Any, num_heads: int) -> bool:
    """Whether some head obeys another rule than a leaf that hides nothing."""
    return any(rule.children or not rule.constant for rule, _ in head_groups(spec, num_heads))
