"""Contexts in which attention is observed: probabilities, masks, inputs of rules.

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
from keras_headmask.retrofit.adapters import AttentionLayer, adapted, without_remat
from keras_headmask.retrofit.call import current_frame, inputs_of, without_rules
from keras_headmask.retrofit.rule import rules_in_force, spec_of
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.stale import graph_being_built
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
    entry = _one_layer(survey, layer)
    kept: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(run: Run) -> None:
        values = ops.convert_to_numpy(ops.cast(run.probabilities, "float32"))
        kept.append((values, _allowed(run)))

    _run_once(survey.model, [entry], inputs, keep)
    if not -len(kept) <= call < len(kept):
        raise ValueError(
            f"The attention layer {entry} ran {len(kept)} times in this forward, so `call` must "
            f"be below that. Received: {call}."
        )
    probabilities, allowed = kept[call]
    spec = spec_of(entry.layer)
    return Observed(entry, spec, probabilities, np.broadcast_to(allowed, probabilities.shape))


def _run_once(
    model: keras.Model, entries: list[AttentionLayer], inputs: Any, keep: Callable[["Run"], None]
) -> None:
    """Run `model` on `inputs`, as in inference, and call `keep` in each run of attention."""
    wrong: list[str] = []  # (Keras rewrites errors that are raised inside of a call)

    def see(run: Run) -> None:
        if len(run.probabilities.shape) != 4:
            wrong.append(
                f"The attention layer {run.entry} attends over several axes, not over one of "
                "queries and one of keys."
            )
        elif graph_being_built() is not None:
            wrong.append(f"The attention layer {run.entry} runs in a `tf.function` of its own.")
        else:
            keep(run)

    with runs_seen(entries, see), without_remat(model):
        model(inputs, training=False)
    if wrong:
        raise ValueError(wrong[0])


def _one_layer(survey: Survey, layer: Any) -> AttentionLayer:
    entries = selected(survey, layer)
    if len(entries) != 1:
        paths = [entry.path for entry in entries]
        raise ValueError(
            f"`layer` must name one attention layer; {layer!r} names {len(paths)}: {paths}. Pass a "
            "number, counted over self-attention in forward order, or a regex on the path."
        )
    return entries[0]


class Run(NamedTuple):
    """One run of an attention layer: what it was called with, and what it computed."""

    entry: AttentionLayer
    call: Mapping[str, Any]  # the arguments of its call, by name
    arguments: Mapping[str, Any]  # those of `_compute_attention`
    probabilities: Any  # (B, H, T, S)


@contextlib.contextmanager
def runs_seen(entries: list[AttentionLayer], see: Callable[[Run], None]) -> Iterator[None]:
    """Call `see` with each run of the layers of `entries` in this context, while the layer runs."""
    calls: dict[str, Mapping[str, Any]] = {}  # the last of each layer, by its path

    def called(entry: AttentionLayer, arguments: Mapping[str, Any]) -> None:
        calls[entry.path] = arguments

    def computed(
        entry: AttentionLayer, usual: Callable, arguments: dict[str, Any]
    ) -> tuple[Any, Any]:
        context, probabilities = usual(arguments | {"return_attention_scores": True})
        see(Run(entry, calls.get(entry.path, {}), arguments, probabilities))
        return context, probabilities if arguments["return_attention_scores"] else None

    with contextlib.ExitStack() as stack:
        for entry in entries:
            compute = functools.partial(computed, entry)
            stack.enter_context(_hook_overridden(entry.layer, compute))
            stack.enter_context(observers.probabilities_wanted(entry.layer))
            # (After the hook: where that is `call` itself, it passes more.)
            stack.enter_context(_called(entry.layer, functools.partial(called, entry)))
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
def _called(layer: Any, see: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `see` with the arguments of each call of `layer`, by name, before it runs."""
    signature = inspect.signature(layer.call)

    def seen(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        see(signature.bind(*args, **kwargs).arguments)
        return usual(*args, **kwargs)

    with observers.overriding(layer, "call", seen):
        yield


def _allowed(run: Run) -> np.ndarray:
    """Everything that restricts the layer in the call that runs now, boolean of rank 4."""
    layer, (_, heads, queries, keys) = run.entry.layer, run.probabilities.shape
    allowed = np.ones((1, 1, queries, keys), bool)
    if run.arguments["attention_mask"] is not None:
        merged = masks.lift(ops.cast(run.arguments["attention_mask"], "bool"))
        allowed = allowed & ops.convert_to_numpy(merged)
    if (window := adapted(layer).window(run.arguments)) is not None:
        mask = evaluation.make_mask(window, queries, keys)
        allowed = allowed & ops.convert_to_numpy(mask)
    of_rules = _mask_of_rules(layer, heads, queries, keys)
    return allowed if of_rules is None else allowed & ops.convert_to_numpy(of_rules)


def _mask_of_rules(layer: Any, heads: int, queries: Any, keys: Any) -> Any:
    """The mask of the rules of `apply_head_masks` in the running call; `None` without a rule."""
    mask, offset = None, current_frame().offset
    for rule in rules_in_force(layer):
        inputs = rule.inputs_from(inputs_of(rule, layer) or {})
        of_rule = evaluation.make_mask(rule.spec, queries, keys, heads, inputs, offset or 0)
        mask = masks.and_masks(mask, of_rule)
    return mask


@dataclasses.dataclass(frozen=True)
class Seen:
    """One run of one attention layer."""

    path: str  # of the layer; with [1], [2], ... where it runs more than once
    probabilities: Any  # (B, H, T, S)
    query_mask: Any  # that of Keras, (B, T), or None


@contextlib.contextmanager
def watched(entries: list[AttentionLayer]) -> Iterator[list[Seen]]:
    """Fill a list with what the attention layers of `entries` compute, in the order they run."""
    seen: list[Seen] = []
    counts: dict[str, int] = {}

    def see(run: Run) -> None:
        count = counts[run.entry.path] = counts.get(run.entry.path, -1) + 1
        path = f"{run.entry.path}[{count}]" if count else run.entry.path
        seen.append(Seen(path, run.probabilities, run.call.get("query_mask")))

    with runs_seen(entries, see):
        yield seen
