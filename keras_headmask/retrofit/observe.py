"""Contexts in which attention is observed or limited: probabilities, masks, inputs of rules.

Each holds in the calling thread alone (see `attention/observers.py`), so that other threads may
run the model meanwhile. Observers get the arguments of `_compute_attention`: many of the observed
layers run code of their class, which knows no `Request`.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import observers
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.retrofit.adapters import AttentionLayer, adapted, without_remat
from keras_headmask.retrofit.call import current_frame, inputs_of, without_rules
from keras_headmask.retrofit.compiled import graph_being_built
from keras_headmask.retrofit.rule import rules_in_force, spec_of
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec


class Observed(NamedTuple):
    """Probabilities (float32) and what is allowed (bool) of one call of a layer.

    Both `(batch, heads, queries, keys)`. `spec` is the rule that the layer obeys, or `None`.
    """

    entry: AttentionLayer
    spec: MaskSpec | None
    probabilities: np.ndarray
    allowed: np.ndarray


def observe(survey: Survey, inputs: Any, layer: Any, call: int) -> Observed:
    """Run the model on `inputs` once, as in inference, and keep what `layer` computes.

    What is allowed is evaluated again from the rules and the masks that reach the layer, so that it
    can be compared with the probabilities.
    """
    entry, model = _one_layer(survey, layer), survey.model
    kept: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(arguments: Mapping[str, Any], probabilities: Any) -> None:
        if len(probabilities.shape) != 4:
            raise ValueError(
                f"The attention layer {entry} attends over several axes: a picture has one of "
                "queries and one of keys."
            )
        values = ops.convert_to_numpy(ops.cast(probabilities, "float32"))
        kept.append((values, _allowed(entry.layer, probabilities.shape, arguments)))

    with probabilities_seen(entry.layer, keep), without_remat(model):
        model(inputs, training=False)
    if not -len(kept) <= call < len(kept):
        raise ValueError(
            f"The attention layer {entry} ran {len(kept)} times in this forward, so `call` must "
            f"be below that. Received: {call}."
        )
    probabilities, allowed = kept[call]
    spec = spec_of(entry.layer)
    return Observed(entry, spec, probabilities, np.broadcast_to(allowed, probabilities.shape))


def masks_in_force(
    model: keras.Model, entries: list[AttentionLayer], inputs: Any
) -> list[tuple[keras.Layer, np.ndarray]]:
    """Each run of the layers of `entries`, and what it allows, `(B or 1, H or 1, T, S)`.

    `model` runs once on `inputs`, as in inference. A layer whose kind is unclear must attend to its
    own sequence in this run.
    """
    masks_of_runs: list[tuple[keras.Layer, np.ndarray]] = []
    wrong: list[str] = []  # (Keras rewrites errors that are raised inside of a call)

    def check(entry: AttentionLayer, arguments: Mapping[str, Any]) -> None:
        query, value = arguments.get("query"), arguments.get("value")
        is_own = value is None or query is value or query is arguments.get("key")
        if entry.kind == "unclear" and not is_own:
            wrong.append(f"The attention layer {entry} attends to another sequence.")

    def see(entry: AttentionLayer, arguments: Mapping[str, Any], probabilities: Any) -> None:
        if len(probabilities.shape) != 4:
            wrong.append(f"The attention layer {entry} attends over several axes.")
        elif graph_being_built() is not None:
            wrong.append(f"The attention layer {entry} runs in a `tf.function` of its own.")
        else:
            masks_of_runs.append(
                (entry.layer, _allowed(entry.layer, probabilities.shape, arguments))
            )

    with contextlib.ExitStack() as stack:
        for entry in entries:
            see_it = functools.partial(see, entry)
            stack.enter_context(probabilities_seen(entry.layer, see_it))
            stack.enter_context(called(entry.layer, functools.partial(check, entry)))
        stack.enter_context(without_remat(model))
        model(inputs, training=False)
    if wrong:
        raise ValueError(wrong[0])
    return masks_of_runs


def _one_layer(survey: Survey, layer: Any) -> AttentionLayer:
    entries = selected(survey, layer)
    if len(entries) != 1:
        paths = [entry.path for entry in entries]
        raise ValueError(
            f"`layer` must name one attention layer; {layer!r} names {len(paths)}: {paths}. Pass a "
            "number, counted over self-attention in forward order, or a regex on the path."
        )
    return entries[0]


@contextlib.contextmanager
def probabilities_seen(layer: Any, see: Callable[[Mapping[str, Any], Any], None]) -> Iterator[None]:
    """Call `see` with the arguments and the probabilities of each run of `layer` in this context.

    The probabilities are `(B, H, T, S)`; the arguments are those of `_compute_attention`.
    """

    def computed(usual: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        context, probabilities = usual(arguments | {"return_attention_scores": True})
        see(arguments, probabilities)
        return context, probabilities if arguments["return_attention_scores"] else None

    with _hook_overridden(layer, computed), observers.probabilities_wanted(layer):
        yield


def _hook_overridden(layer: Any, override: Callable) -> AbstractContextManager[None]:
    """Let `override(usual, arguments)` be called for the hook of `layer`.

    It returns context and probabilities, as `usual(arguments)` does; the arguments are by name.
    """
    adapter = adapted(layer)

    def computed(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        def both(arguments: dict[str, Any]) -> tuple[Any, Any]:
            if inspect.ismethod(usual):  # of the class
                return without_rules(adapter, arguments)
            result = usual(**arguments)
            return result if adapter.gives_pair(arguments) else (result, None)

        arguments = adapter.arguments(*args, **kwargs)
        context, probabilities = override(both, arguments)
        return (context, probabilities) if adapter.gives_pair(arguments) else context

    return observers.overriding(layer, adapter.hook, computed)


@contextlib.contextmanager
def called(layer: Any, see: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `see` with the arguments of each call of `layer`, by name, before it runs.

    Enter this after `probabilities_seen`: where the hook is `call` itself, that one passes more.
    """
    signature = inspect.signature(layer.call)

    def seen(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        see(signature.bind(*args, **kwargs).arguments)
        return usual(*args, **kwargs)

    with observers.overriding(layer, "call", seen):
        yield


def _allowed(layer: Any, shape: Any, arguments: Mapping[str, Any]) -> np.ndarray:
    """Everything that restricts the layer in the call that runs now, boolean of rank 4."""
    _, heads, queries, keys = shape
    allowed = np.ones((1, 1, queries, keys), bool)
    if arguments["attention_mask"] is not None:
        merged = masks.lift(ops.cast(arguments["attention_mask"], "bool"))
        allowed = allowed & ops.convert_to_numpy(merged)
    if (window := adapted(layer).window(arguments)) is not None:
        mask = evaluation.make_mask(window, queries, keys)
        allowed = allowed & ops.convert_to_numpy(mask)
    of_rules = mask_of_rules(layer, heads, queries, keys)
    return allowed if of_rules is None else allowed & ops.convert_to_numpy(of_rules)


def mask_of_rules(layer: Any, heads: int, queries: Any, keys: Any) -> Any:
    """The mask of the rules of `apply_head_masks` in the running call; `None` without a rule."""
    mask, offset = None, current_frame().offset
    for rule in rules_in_force(layer):
        inputs = rule.inputs_from(inputs_of(rule, layer) or {})
        of_rule = evaluation.make_mask(rule.spec, queries, keys, heads, inputs, offset or 0)
        mask = masks.and_masks(mask, of_rule)
    return mask


# --- For exports ----------------------------------------------------------------------------------


@contextlib.contextmanager
def keys_limited(entries: list[AttentionLayer], live: Any) -> Iterator[None]:
    """Hide from attention layers the keys where `live`, boolean `(batch, length)`, is false."""
    with contextlib.ExitStack() as stack:
        for entry in entries:
            layer = entry.layer
            if _is_our_own(layer):  # `call` takes a mask of keys, by which it skips tiles
                override = _limited_call(layer.call, live)
                stack.enter_context(observers.overriding(layer, "call", override))
            else:
                limited = functools.partial(_limited, live)
                stack.enter_context(_hook_overridden(layer, limited))
        yield


def _is_our_own(layer: keras.Layer) -> bool:
    is_free = observers.held(layer, adapted(layer).hook) is None
    ours = isinstance(layer, MaskedAttention) and is_free
    return ours and "key_mask" in inspect.signature(layer.call).parameters


def _limited_call(call: Callable, live: Any) -> Callable:
    """`call` of our layer with `live` ANDed to its mask of keys."""
    signature = inspect.signature(call)

    def limited(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        mask = bound.arguments.get("key_mask")
        both = live if mask is None else ops.logical_and(masks.as_bool(mask), live)
        bound.arguments["key_mask"] = both
        return usual(*bound.args, **bound.kwargs)

    return limited


def _limited(live: Any, usual: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The hook with `live` ANDed to `attention_mask`."""
    mask = arguments["attention_mask"]
    if mask is not None and len(mask.shape) != 3:
        both = masks.and_masks(mask, live[:, None, None, :])
    else:  # a mask of rank 3 is taken for padding, which skips tiles
        limit = live[:, None, :]
        both = limit if mask is None else ops.logical_and(masks.as_bool(mask), limit)
    return usual(arguments | {"attention_mask": both})


@dataclasses.dataclass(frozen=True)
class Seen:
    """One run of one attention layer."""

    path: str  # of the layer; with [1], [2], ... where it runs more than once
    probabilities: Any  # (B, H, T, S)
    allowed: Any  # by its rule, boolean (B or 1, H or 1, T, S); None without a rule
    query_mask: Any  # that of Keras, (B, T), or None


@contextlib.contextmanager
def watched(entries: list[AttentionLayer], with_rules: bool = False) -> Iterator[list[Seen]]:
    """Fill a list with what the attention layers of `entries` compute, in the order they run."""
    seen: list[Seen] = []
    runs: dict[str, int] = {}

    def remember(arguments_read: dict[str, Any], arguments: Mapping[str, Any]) -> None:
        names = "mask_inputs", "query_offset", "query_mask"
        arguments_read.update({k: arguments.get(k) for k in names})

    def see(
        entry: AttentionLayer, arguments_read: Any, arguments: Mapping[str, Any], probabilities: Any
    ) -> None:
        allowed = None
        if with_rules:
            allowed = _rules_allow(entry.layer, arguments_read, *ops.shape(probabilities)[2:])
        count = runs[entry.path] = runs.get(entry.path, -1) + 1
        path = f"{entry.path}[{count}]" if count else entry.path
        seen.append(Seen(path, probabilities, allowed, arguments_read["query_mask"]))

    with contextlib.ExitStack() as stack:
        for entry in entries:
            arguments_read: dict[str, Any] = {}
            see_it = functools.partial(see, entry, arguments_read)
            stack.enter_context(probabilities_seen(entry.layer, see_it))
            stack.enter_context(called(entry.layer, functools.partial(remember, arguments_read)))
        yield seen


def _rules_allow(layer: Any, arguments: dict[str, Any], queries: Any, keys: Any) -> Any:
    """The mask of all rules that hold in `layer`, from what they read in this run."""
    mask = mask_of_rules(layer, adapted(layer).num_heads, queries, keys)
    if getattr(layer, "_restricts", False):
        offset, inputs = arguments.get("query_offset") or 0, arguments.get("mask_inputs")
        spec, heads = layer.mask_spec, layer.num_heads
        own = evaluation.make_mask(spec, queries, keys, heads, inputs, offset)
        mask = masks.and_masks(mask, own)
    return mask
