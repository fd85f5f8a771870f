"""What attention layers attend to in a forward, and what they are allowed to."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.retrofit import hooks
from keras_headmask.retrofit.selectors import AttentionLayer, find_attention, select
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.positions import Window


class Observed(NamedTuple):
    """Probabilities (float32) and what is allowed (bool) of one call of a layer.

    Both `(batch, heads, queries, keys)`. `spec` is the rule that the layer obeys, or `None`.
    """

    entry: AttentionLayer
    spec: MaskSpec | None
    scores: np.ndarray
    allowed: np.ndarray


def observe(model: keras.Model, inputs: Any, layer: Any, call: int) -> Observed:
    """Run `model` on `inputs` once, as in inference, and keep what `layer` computes.

    What is allowed is evaluated anew, from the rules and the masks that reach the layer, so that
    the two can be held against each other.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: {model!r}.")
    entry = _one_layer(model, layer)
    kept: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(arguments: Mapping[str, Any], scores: Any) -> None:
        if len(arguments["query"].shape) != 4:
            raise ValueError(
                f"The attention layer {entry} attends over several axes: a picture has one of "
                "queries and one of keys."
            )
        kept.append((_numpy(scores), _allowed(entry.layer, scores.shape, arguments)))

    rematerialised = [x for x in _keras.layers_of(model) if _keras.remat_mode(x) is not None]
    with watched(entry.layer, keep), contextlib.ExitStack() as stack:
        for inner in rematerialised:  # JAX would run these on tracers, which hold no numbers
            stack.enter_context(looking.overriding(inner, _keras.REMATERIALIZED_CALL, _run_once))
        model(inputs, training=False)
    if not -len(kept) <= call < len(kept):
        raise ValueError(
            f"The attention layer {entry} ran {len(kept)} times in this forward, so `call` must "
            f"be below that. Received: {call}."
        )
    scores, allowed = kept[call]
    spec = hooks.spec_beneath(entry.layer)
    return Observed(entry, spec, scores, np.broadcast_to(allowed, scores.shape))


def _run_once(usual: Callable, layer_call: Callable, *args: Any, **kwargs: Any) -> Callable:
    return layer_call


def _one_layer(model: keras.Model, layer: Any) -> AttentionLayer:
    found = find_attention(model)
    numbers = select(found, layer)
    if len(numbers) != 1:
        paths = [found.known[number].path for number in numbers]
        raise ValueError(
            f"`layer` must name one attention layer; {layer!r} names {len(paths)}: {paths}. Pass a "
            "number, counted over self-attention in forward order, or a regex on the path."
        )
    return found.known[numbers[0]]


@contextlib.contextmanager
def watched(layer: Any, see: Callable[[Mapping[str, Any], Any], None]) -> Iterator[None]:
    """Call `see` with the arguments and the scores of each run of `layer` in this context.

    The scores are `(B, H, T, S)`; the arguments are those of `_compute_attention`.
    """

    def compute_attention(
        usual: Callable,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        arguments = {"query": query, "key": key, "value": value, "attention_mask": attention_mask}
        arguments["training"] = training
        if use_causal_mask:  # else left out: subclasses of old do not know it
            arguments["use_causal_mask"] = True
        context, scores = usual(**arguments, return_attention_scores=True)
        see(arguments, scores)
        return context, scores if return_attention_scores else None

    attention = looking.overriding(layer, _keras.COMPUTE_ATTENTION, compute_attention)
    with attention, looking.scores_wanted(layer):
        yield


@contextlib.contextmanager
def called(layer: Any, see: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `see` with the arguments of each call of `layer`, by name, before it runs."""
    signature = inspect.signature(layer.call)

    def seen(usual: Callable, *args: Any, **kwargs: Any) -> Any:
        see(signature.bind(*args, **kwargs).arguments)
        return usual(*args, **kwargs)

    with looking.overriding(layer, "call", seen):
        yield


def _allowed(layer: Any, shape: Any, arguments: Mapping[str, Any]) -> np.ndarray:
    """Everything that restricts the layer in the forward now running, boolean of rank 4."""
    _, heads, queries, keys = shape
    allowed = np.ones((1, 1, queries, keys), bool)
    if arguments["attention_mask"] is not None:
        given = masks.lift(ops.cast(arguments["attention_mask"], "bool"))
        allowed = allowed & ops.convert_to_numpy(given)
    if arguments.get("use_causal_mask"):
        mask = evaluation.make_mask(Window(after=0), queries, keys)
        allowed = allowed & ops.convert_to_numpy(mask)
    of_rules = mask_of_rules(layer, heads, queries, keys)
    return allowed if of_rules is None else allowed & ops.convert_to_numpy(of_rules)


def mask_of_rules(layer: Any, heads: int, queries: Any, keys: Any) -> Any:
    """What the rules of masked models allow in the forward now running; `None` without a rule."""
    mask = None
    for rule, binding in hooks.rules_at_work(layer):
        given, offset = rule.given(binding.tensors), binding.query_offset
        made = evaluation.make_mask(rule.spec, queries, keys, heads, given, offset)
        mask = masks.and_masks(mask, made)
    return mask


def _numpy(tensor: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))
