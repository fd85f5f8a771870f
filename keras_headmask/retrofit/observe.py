"""Contexts in which attention is observed: probabilities, masks, inputs of rules.

Each holds in the calling thread alone (see `attention/scopes.py`), so that other threads may
run the model meanwhile. Observers get the arguments of `_compute_attention`: many of the observed
layers run code of their class, which knows no `Request`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import scopes
from keras_headmask.retrofit.adapters import AttentionLayer, adapted, without_remat
from keras_headmask.retrofit.find import Found, selected
from keras_headmask.retrofit.frame import (
    current_frame,
    graph_being_built,
    rules_of,
    spec_of,
    tensors_of,
)
from keras_headmask.retrofit.masked_attention import without_rules
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


def observe(found: Found, inputs: Any, layer: Any) -> Observed:
    """Run the model on `inputs` once, as in inference, and keep what `layer` first computes.

    What is allowed is evaluated again from the rules and the masks that reach the layer, so that it
    can be compared with the probabilities.
    """
    entries = selected(found, layer)
    if len(entries) != 1:
        paths = [entry.path for entry in entries]
        raise ValueError(
            f"`layer` must name one attention layer; {layer!r} names {len(paths)}: {paths}. Pass a "
            "number, counted over self-attention in forward order, or a regex on the path."
        )
    (entry,) = entries
    kept: list[Any] = []  # (Keras rewrites errors that are raised inside of a call)

    def keep(run: Run) -> None:
        if len(run.probabilities.shape) != 4:
            kept.append("attends over several axes, not over one of queries and one of keys")
        elif graph_being_built() is not None:
            kept.append("runs in a `tf.function` of its own")
        else:
            values = ops.convert_to_numpy(ops.cast(run.probabilities, "float32"))
            kept.append((values, np.broadcast_to(_allowed(run), values.shape)))

    with runs_seen(entries, keep), without_remat(found.model):
        found.model(inputs, training=False)
    first = kept[0] if kept else "did not run in this forward"
    if isinstance(first, str):
        raise ValueError(f"The attention layer {entry} {first}.")
    return Observed(entry, spec_of(entry.layer), *first)


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

    def called(entry: AttentionLayer, usual: Callable, *args: Any, **kwargs: Any) -> Any:
        calls[entry.path] = signatures[entry.path].bind(*args, **kwargs).arguments
        return usual(*args, **kwargs)

    def computed(entry: AttentionLayer, usual: Callable, *args: Any, **kwargs: Any) -> Any:
        adapter = adapted(entry.layer)
        arguments = adapter.arguments(*args, **kwargs)
        wanted = arguments | {"return_attention_scores": True}
        is_of_class = inspect.ismethod(usual)
        context, probabilities = without_rules(adapter, wanted) if is_of_class else usual(**wanted)
        see(Run(entry, calls.get(entry.path, {}), arguments, probabilities))
        if not adapter.gives_pair(arguments):
            return context
        return context, probabilities if arguments["return_attention_scores"] else None

    signatures = {entry.path: inspect.signature(entry.layer.call) for entry in entries}
    with contextlib.ExitStack() as stack:
        for entry in entries:
            hook, compute = adapted(entry.layer).hook, functools.partial(computed, entry)
            stack.enter_context(scopes.overriding(entry.layer, hook, compute))
            stack.enter_context(scopes.probabilities_wanted(entry.layer))
            # (After the hook: where that is `call` itself, it passes more.)
            call = functools.partial(called, entry)
            stack.enter_context(scopes.overriding(entry.layer, "call", call))
        yield


def _allowed(run: Run) -> np.ndarray:
    """Everything that restricts the layer in the call that runs now, boolean of rank 4."""
    layer, (_, heads, queries, keys) = run.entry.layer, run.probabilities.shape
    given, window = run.arguments["attention_mask"], adapted(layer).window(run.arguments)
    restricts = [] if given is None else [masks.lift(ops.cast(given, "bool"))]
    restricts += [] if window is None else [evaluation.make_mask(window, queries, keys)]
    offset = current_frame().offset or 0
    for rule in rules_of(layer):
        inputs = rule.inputs_from(tensors_of(rule) or {})
        restricts.append(evaluation.make_mask(rule.spec, queries, keys, heads, inputs, offset))
    allowed = np.ones((1, 1, queries, keys), bool)
    for mask in restricts:
        allowed = allowed & ops.convert_to_numpy(mask)
    return allowed


class Seen(NamedTuple):
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
