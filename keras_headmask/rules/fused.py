"""Rules as the few arguments that fused attention takes in place of a mask."""

from typing import NamedTuple

from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.positions import Window


class Fused(NamedTuple):
    """Arguments of `jax.nn.dot_product_attention` that say what a rule says."""

    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None


def lowered(rule: MaskSpec, queries: int, keys: int, query_offset: int = 0) -> Fused | None:
    """`rule`, free of `PerHead`, as arguments that cuDNN takes; `None` if it has none.

    It takes causal attention, with a window behind the query or without, of one sequence to
    itself, and attention to every key.
    """
    if rule.constant:
        return Fused()
    parts = rule.children if rule.kind == "and" else (rule,)
    windows = [part for part in parts if type(part) is Window and part.step == 1]
    if len(windows) != len(parts) or queries != keys or query_offset:
        return None
    befores = [part.before for part in windows if part.before is not None]
    afters = [part.after for part in windows if part.after is not None]
    if min(afters, default=1) != 0 or min(befores, default=0) < 0:
        return None
    reach = min(befores, default=queries)
    return Fused(True, None if reach >= queries - 1 else (reach, 0))
