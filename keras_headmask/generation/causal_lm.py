"""`generate()` of a causal language model under rules.

KerasHub's own code runs: its sampler, its loop, its forward of one token. Instead of its cache, one
tensor for all layers, it gets one that has its shape and no heads; the keys themselves are kept by
`head_cache`, and what the rules read is kept beside them.
"""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention.tuning import holding
from keras_headmask.generation import head_cache
from keras_headmask.masks import Length, Tensor
from keras_headmask.retrofit import masked_model
from keras_headmask.retrofit.adapters import adapted
from keras_headmask.retrofit.call import Frame, opened_frame, with_cache
from keras_headmask.retrofit.edges import HeadMaskInputs, names_read
from keras_headmask.retrofit.rule import (
    attention_inside,
    is_masked,
    rules_in_force,
    whole_masks,
)

_TOKENS, _PADDING = "token_ids", "padding_mask"  # the inputs of KerasHub's models
# Arguments of no use to a text without images: its prompt is cut before the padding.
_OF_TEXT = _PADDING, "cache_update_mask"


class _Prompt(NamedTuple):
    """The prompt of `generate()`."""

    inputs: dict[str, Tensor]  # what the rules read, `(B, length)`
    length: int  # of the text, with all tokens to come
    shortest: Length  # of the prompts


_prompt: ContextVar[_Prompt | None] = ContextVar("prompt", default=None)
_GENERATED = "generated"  # a mask input: true at the tokens that `generate()` writes


if TYPE_CHECKING:
    from keras_hub.models import CausalLM as _CausalLM
else:
    _CausalLM = object


class _Generates(_CausalLM):
    """A mixin for a causal language model of KerasHub's: a cache that obeys the rules."""

    def generate_step(self, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # KerasHub makes a `tf.function` of this method, so AutoGraph rewrites it: for a `super()`
        # without arguments it puts a function that keeps the model alive for good.
        stock = super(_Generates, self).generate_step  # noqa: UP008
        length = inputs[_TOKENS].shape[1]
        if not self.keeps_by_head() or length is None:
            return stock(inputs, *args, **kwargs)
        lengths = ops.sum(ops.cast(inputs[_PADDING], "int32"), axis=-1)
        shortest = ops.maximum(ops.min(lengths), 1)
        with holding(_prompt, _Prompt(self._read_by_rules(inputs), length, shortest)):
            return stock(inputs, *args, **kwargs)

    def call_with_cache(
        self, token_ids: Tensor, cache: Any, cache_update_index: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """KerasHub's forward of a prompt or of one token; in `generate()`, with a cache of ours."""
        prompt, is_step = _prompt.get(), isinstance(cache, Mapping)
        images = [x for name, x in kwargs.items() if name not in _OF_TEXT]
        if (
            prompt is None
            or any(x is not None for x in (*args, *images))
            or not (is_step or token_ids.shape[1] == prompt.length)  # a step that images began
        ):
            return super().call_with_cache(token_ids, cache, cache_update_index, *args, **kwargs)
        if is_step:
            return self._step(prompt, token_ids, cache, cache_update_index)
        inputs, states = prompt.inputs, _states(cache)
        padding = {_PADDING: kwargs[_PADDING]} if states else {}
        if _has_any_size() and not states:  # what follows the prompt is padding
            token_ids = token_ids[:, : prompt.shortest]
            inputs = {name: _cut_to_prompt(x, prompt.shortest) for name, x in inputs.items()}
        run = head_cache.Run(prompt.length, prompt.shortest - 1)
        logits, hidden_states, ours = self._run(
            run, token_ids, inputs, states, cache_update_index, **padding
        )
        rest = ops.zeros_like(hidden_states[:, :1])
        rest = ops.repeat(rest, prompt.length - ops.shape(hidden_states)[1], axis=1)
        hidden_states = ops.concatenate([hidden_states, rest], axis=1)  # as samplers expect it
        hidden_states = ops.reshape(hidden_states, (-1, prompt.length, hidden_states.shape[-1]))
        return logits, hidden_states, ours | {"inputs": dict(prompt.inputs)}

    def _step(
        self, prompt: _Prompt, token_ids: Tensor, cache: Mapping[str, Any], index: Any
    ) -> Any:
        inputs = dict(cache["inputs"])
        for name, new in ((_TOKENS, token_ids), (_PADDING, ops.ones_like(token_ids))):
            if name in inputs:
                inputs[name] = ops.slice_update(inputs[name], (0, index), ops.cast(new, "int32"))
        run = head_cache.Run(prompt.length, index, cache["layers"])
        logits, hidden_states, ours = self._run(run, token_ids, inputs, cache["states"], index)
        return logits, hidden_states, ours | {"inputs": inputs}

    def _run(
        self,
        run: Any,
        token_ids: Tensor,
        inputs: dict[str, Tensor],
        states: tuple[Tensor, ...],
        index: Any,
        **padding: Any,
    ) -> Any:
        """KerasHub's forward with a cache that has its shape and no heads.

        `states` are what linear attention holds beside the keys, of all layers.
        """
        layers, is_step = attention_inside(self), run.states is not None
        batch, length = ops.shape(token_ids)
        length = run.length if is_step else length
        number = states[0].shape[1] if states else len(layers)
        cache: Any = ops.zeros((batch, number, 2, length, 0, 0))
        if adapted(layers[0]).caches_in_pairs:
            cache = ((ops.zeros((batch, length, 0, 0)),) * 2,) * number
        cache = (cache, *states) if states else cache
        with with_cache(run), self._opened(inputs, index if is_step else 0):
            forward = super().call_with_cache(token_ids, cache, index, **padding)
        return *forward[:2], {"layers": run.made, "states": _states(forward[2])}

    def score(
        self, token_ids: Tensor, padding_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """KerasHub's own, which calls the layers one by one, with what their rules read."""
        inputs = {_TOKENS: ops.convert_to_tensor(token_ids)}
        ones = ops.ones_like(inputs[_TOKENS])
        inputs[_PADDING] = ones if padding_mask is None else padding_mask
        with self._opened(self._read_by_rules(inputs, "score"), None):
            return super().score(token_ids, padding_mask, *args, **kwargs)

    def _opened(self, inputs: dict[str, Tensor], offset: Any) -> AbstractContextManager[Frame]:
        """A frame in which each owner of a rule has `inputs`, and what all layers share of them."""
        for layer in _keras.layers_of(self):
            if isinstance(layer, HeadMaskInputs):
                names = names_read(layer)
                inputs = inputs | layer({name: inputs[name] for name in names})
        rules = (rule for x in attention_inside(self) for rule in rules_in_force(x))
        owners = {id(rule.owner): rule.owner for rule in rules if rule.owner is not None}
        return opened_frame(owners.values(), inputs, offset)

    def keeps_by_head(self) -> bool:
        """Whether the keys can be kept by heads: else KerasHub's cache holds them all."""
        takes = list(inspect.signature(super().call_with_cache).parameters)
        is_of_text = takes == [_TOKENS, "cache", "cache_update_index"]
        # `vision_indices` say which tokens stand for images: without any, it is a text as others.
        if not is_of_text and ("vision_indices" not in takes or _keras.is_assisted(self)):
            return False
        layers = attention_inside(self)
        return all(is_masked(layer) and head_cache.keeps(layer) for layer in layers)

    def _read_by_rules(
        self, inputs: Mapping[str, Any], method: str = "generate"
    ) -> dict[str, Tensor]:
        """The mask inputs of the rules, taken from the inputs of `generate()` or `score()`."""
        in_force = (rule for x in attention_inside(self) for rule in rules_in_force(x))
        rules = [rule for rule in in_force if rule.restricts]
        names = sorted({name for rule in rules for name in rule.reads})
        values = dict(inputs)
        if method == "generate" and _GENERATED in names and _GENERATED not in values:
            values[_GENERATED] = ops.logical_not(ops.cast(values[_PADDING], "bool"))
        lacking = [name for name in names if name not in values]
        if lacking and method == "score":
            raise ValueError(
                f"The rules of '{self.name}' read {lacking}, and `score()` takes 'token_ids' and "
                "'padding_mask' alone. Call the model with a dict of all its inputs, "
                "`model({...})`: it returns the same logits."
            )
        if lacking:
            raise ValueError(
                f"The rules of '{self.name}' read {lacking}, which `generate()` was not given. "
                "Set `model.preprocessor = None` and pass them in the dict beside 'token_ids' and "
                "'padding_mask', each as long as the whole text, with the values of the tokens to "
                f"come. Received: {sorted(inputs)}."
            )
        tensors = {name: masks.as_mask_input(values[name]) for name in names}
        wanted, whole = tuple(inputs[_TOKENS].shape), whole_masks(rules)
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if name in whole:
                batch, length = wanted
                if len(shape) != 4 or shape[0] != batch or shape[2:] != (length, length):
                    raise ValueError(
                        f"The whole mask `{name}` must cover the whole text, tokens to come "
                        f"included: shape (batch, heads or 1, {length}, {length}), with as many "
                        f"examples as 'token_ids' of shape {wanted}. Received: shape {shape}."
                    )
                tensors[name] = masks.as_bool(tensor, name)
            elif shape != wanted:
                raise ValueError(
                    f"`{name}` must be as long as the whole text, tokens to come included: shape "
                    f"{wanted}, as 'token_ids'. Received: shape {shape}."
                )
        return {k: x if k in whole else ops.cast(x, "int32") for k, x in tensors.items()}


def _cut_to_prompt(x: Tensor, length: Length) -> Tensor:
    """A mask input, cut to the first `length` positions."""
    return x[:, :, :length, :length] if len(x.shape) == 4 else x[:, :length]


def _states(cache: Any) -> tuple[Tensor, ...]:
    """What a cache of KerasHub's holds beside the keys: the states of linear attention."""
    has_states = isinstance(cache, tuple) and not isinstance(cache[0], tuple)
    return cache[1:] if has_states else ()


def _has_any_size() -> bool:
    """Whether a slice may have a size that is known only when it runs."""
    backend = keras.backend.backend()
    return backend == "torch" or (backend == "tensorflow" and not _keras.tensorflow.in_xla())


class HeadMaskedCausalLM(_Generates, masked_model.HeadMasked):
    """A causal language model under rules, which generates text."""

    masks_all_attention = True  # all layers keep their keys in one cache


masked_model.add_kind(HeadMaskedCausalLM, head_cache.generates)
