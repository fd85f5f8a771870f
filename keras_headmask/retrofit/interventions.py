"""What an export does to the attention of a model while it looks at it: see it, limit its keys.

Each is a context of the caller's own, by `looking`: other threads may run the model meanwhile.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
from keras_headmask.retrofit import hooks, observing
from keras_headmask.retrofit.selectors import AttentionLayer, find_attention
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.per_head import head_groups
from keras_headmask.rules.positions import Full

_HOOK = _keras.COMPUTE_ATTENTION


def rules_of(model: keras.Model) -> dict[str, MaskSpec]:
    """The rule of each attention layer that has one, by the layer's path."""
    specs = {e.path: hooks.spec_beneath(e.layer) for e in find_attention(model).known}
    return {path: spec for path, spec in specs.items() if spec is not None}


def restricts(spec: MaskSpec, num_heads: int) -> bool:
    return [rule for rule, _ in head_groups(spec, num_heads)] != [Full()]


@contextlib.contextmanager
def keys_limited(model: keras.Model, live: Any) -> Iterator[None]:
    """Hide from all attention the keys where `live`, boolean `(batch, length)`, is false."""
    with contextlib.ExitStack() as stack:
        for entry in find_attention(model).known:
            layer = entry.layer
            if _is_our_own(layer):  # by its call, where a mask of keys lets it skip tiles
                name, override = "call", _limited_call(layer.call, live)
            else:
                name, override = _HOOK, _limited_attention(getattr(layer, _HOOK), live)
            stack.enter_context(looking.overriding(layer, name, override))
        yield


def _is_our_own(layer: keras.Layer) -> bool:
    is_free = looking.held(layer, _HOOK) is None
    ours = isinstance(layer, PerHeadMaskedMultiHeadAttention) and is_free
    return ours and "key_mask" in inspect.signature(layer.call).parameters


def _limited_call(method: Callable, live: Any) -> Callable:
    signature = inspect.signature(method)

    def call(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        key_mask = bound.arguments.get("key_mask")
        limited = live if key_mask is None else ops.logical_and(masks.as_bool(key_mask), live)
        bound.arguments["key_mask"] = limited
        return usual(*bound.args, **bound.kwargs)

    return call


def _limited_attention(method: Callable, live: Any) -> Callable:
    signature = inspect.signature(method)

    def compute_attention(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        mask = bound.arguments.get("attention_mask")
        if mask is None or len(mask.shape) == 3:
            limit = live[:, None, :]  # of rank 3 a rule tells it for padding, and skips tiles
            limited = limit if mask is None else ops.logical_and(masks.as_bool(mask), limit)
        else:
            limited = masks.and_masks(mask, live[:, None, None, :])
        bound.arguments["attention_mask"] = limited
        return usual(*bound.args, **bound.kwargs)

    return compute_attention


@dataclasses.dataclass(frozen=True)
class Seen:
    """One run of one attention layer."""

    path: str  # of the layer; with [1], [2], ... where it runs more than once
    scores: Any  # the probabilities (B, H, T, S)
    allowed: Any  # what its rule allows, boolean (B or 1, H or 1, T, S); None without a rule


@contextlib.contextmanager
def watched(
    model: keras.Model, entries: list[AttentionLayer], with_rules: bool = False
) -> Iterator[list[Seen]]:
    """Fill a list with what the attention layers of `entries` compute, in the order they run."""
    seen: list[Seen] = []
    runs: dict[str, int] = {}

    def see(entry: AttentionLayer, scores: Any, allowed: Any) -> None:
        count = runs[entry.path] = runs.get(entry.path, -1) + 1
        seen.append(Seen(f"{entry.path}[{count}]" if count else entry.path, scores, allowed))

    with contextlib.ExitStack() as stack:
        for entry in entries:
            stack.enter_context(_watched(entry, see, with_rules))
        yield seen


@contextlib.contextmanager
def _watched(entry: AttentionLayer, see: Callable, with_rules: bool) -> Iterator[None]:
    layer = entry.layer
    given: dict[str, Any] = {}

    def remember(arguments: Mapping[str, Any]) -> None:
        given.update({k: arguments.get(k) for k in ("mask_inputs", "query_offset")})

    def attended(arguments: Mapping[str, Any], scores: Any) -> None:
        allowed = None
        if with_rules:
            sizes = (ops.shape(arguments[name])[1] for name in ("query", "key"))
            allowed = _allowed(layer, given, *sizes)
        see(entry, scores, allowed)

    with observing.watched(layer, attended), observing.called(layer, remember):
        yield


def _allowed(layer: Any, given: dict[str, Any], queries: Any, keys: Any) -> Any:
    """The mask of all rules that hold in `layer`, from what they read in this run."""
    mask = observing.mask_of_rules(layer, layer.num_heads, queries, keys)
    if getattr(layer, "_restricts", False):
        offset, inputs = given.get("query_offset") or 0, given.get("mask_inputs")
        spec, heads = layer.mask_spec, layer.num_heads
        own = evaluation.make_mask(spec, queries, keys, heads, inputs, offset)
        mask = masks.and_masks(mask, own)
    return mask
