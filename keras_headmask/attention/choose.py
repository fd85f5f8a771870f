"""Which kernel computes a request: the first of its backend that does not refuse it.

What each refuses, and the sentence that says why, stands in `kernels`; the numbers are `Tuning`'s.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from keras_headmask.attention import half_precision
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.kernels import Kernel, first, impossible, kernels_for, without_choice
from keras_headmask.attention.request import Request
from keras_headmask.attention.tuning import Held, current_tuning, holding
from keras_headmask.masks import Tensor
from keras_headmask.rules.positions import Full

_FULL = Full()  # (Made once: `torch.compile` cannot read how a spec is made.)

# Gets each request, and may return the context in place of a kernel.
_Watch = Callable[[Request, Part], Tensor | None]
_watch: Held[_Watch | None] = Held("watch", None)


def watched(watch: _Watch) -> AbstractContextManager[Any]:
    """Let `watch` see each request that is made inside."""
    return holding(_watch, watch)


def choose(request: Request, part: Part) -> Kernel:
    """The kernel that computes `request`, of which `part` are all heads.

    Raises:
        ValueError: for `tiled=True` where nothing can be skipped.
    """
    reason = None if without_choice(request) else impossible(request)
    if request.tiled and reason is not None:
        raise ValueError(f"`tiled=True` is not possible here: {reason}.")
    chosen = first(kernels_for(request), request, part)
    assert chosen is not None  # the last refuses nothing
    return chosen


def attend(request: Request) -> tuple[Tensor, Tensor | None]:
    """The context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before dropout.

    Both have the dtype of the value. The probabilities are `None` where not all logits were
    computed.

    Raises:
        ValueError: for `tiled=True` where nothing can be skipped.
    """
    part, watch = part_of_all(request), _watch.get()
    context = None if watch is None else watch(request, part)
    if context is not None:
        return context, None
    return choose(request, part).run(request, part)


def part_of_all(request: Request) -> Part:
    """All heads, and what is known of them before a tile is cut."""
    heads, tuning = tuple(range(request.query.shape[2])), current_tuning()
    if request.tiled:  # not by all logits where there is a choice
        tuning = dataclasses.replace(tuning, most_logits=0)
    half = half_precision.half_dtype(request.scale, request.query, request.key, request.value)
    rule = _FULL if request.rule is None else request.rule
    rest = request.bound, request.scale, tuning
    return Part(rule, heads, *rest, sharing=request.sharing, half=half)
