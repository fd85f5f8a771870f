"""`generate()` of KerasHub's tasks under rules.

KerasHub's own code runs: its sampler, its loop, its cache of all keys. It calls the layers of the
model, not the model, so the frame is opened here. A step gets the newest token alone: for a causal
language model, what the rules read of the whole text is kept beside the keys, in one structure, of
which a sampler picks examples.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention.scopes import holding
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.adapters import attention
from keras_headmask.retrofit.frame import STATE, Frame, LayerRule, opened, rules_of, whole_masks
from keras_headmask.retrofit.masked_model import MaskedModel, add_kind

_TOKENS, _PADDING = "token_ids", "padding_mask"  # the inputs of KerasHub's models
_GENERATED = "generated"  # a mask input: true at the tokens that `generate()` writes

# What the rules read of the text of `generate()`, until the prompt's forward has made a cache.
_text: ContextVar[dict[str, Tensor] | None] = ContextVar("text", default=None)


if TYPE_CHECKING:
    from keras_hub.models import CausalLM as _CausalLM
else:
    _CausalLM = object


class Generates(MaskedModel, _CausalLM):
    """A task of KerasHub's under rules; those on positions hold while it generates text."""

    def generate_step(self, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # KerasHub makes a `tf.function` of this method, so AutoGraph rewrites it: for a `super()`
        # without arguments it puts a function that keeps the model alive for good.
        with self._opened({}):
            return super(Generates, self).generate_step(inputs, *args, **kwargs)  # noqa: UP008

    def _opened(self, inputs: dict[str, Tensor]) -> AbstractContextManager[Frame]:
        """A frame in which this model and those inside it have `inputs`."""
        owners = {rule.owner for layer in attention(self) for rule in rules_of(layer)}
        return opened({model: vars(model)[STATE].prepared(inputs) for model in owners})


class GeneratesFromCache(Generates):
    """A causal language model under rules, which also hold if they read its text."""

    def generate_step(self, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # (An assisted one drafts by another model, which reads KerasHub's cache.)
        text = None if _keras.is_assisted(self) else self._read_by_rules(inputs)
        with holding(_text, text):
            return super(GeneratesFromCache, self).generate_step(inputs, *args, **kwargs)  # noqa: UP008

    def call_with_cache(
        self, token_ids: Tensor, cache: Any, cache_update_index: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """KerasHub's forward of a prompt or of new tokens, with what the rules read."""
        forward, inputs = super().call_with_cache, _text.get()
        if isinstance(cache, Mapping):
            inputs, cache = dict(cache["inputs"]), cache["keys"]
            for name, new in ((_TOKENS, token_ids), (_PADDING, ops.ones_like(token_ids))):
                if name in inputs:
                    new = ops.cast(new, "int32")
                    inputs[name] = ops.slice_update(inputs[name], (0, cache_update_index), new)
        known = inputs or {}
        rows = {name: _rows(x, token_ids, cache_update_index) for name, x in known.items()}
        with self._opened(rows):
            outputs = forward(token_ids, cache, cache_update_index, *args, **kwargs)
        return (*outputs[:2], {"keys": outputs[2], "inputs": inputs}) if inputs else outputs

    def score(
        self, token_ids: Tensor, padding_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """KerasHub's own, which calls the layers one by one, with what their rules read."""
        inputs = {_TOKENS: ops.convert_to_tensor(token_ids)}
        ones = ops.ones_like(inputs[_TOKENS])
        inputs[_PADDING] = ones if padding_mask is None else padding_mask
        with self._opened(self._read_by_rules(inputs, "score")):
            return super().score(token_ids, padding_mask, *args, **kwargs)

    def _rules(self) -> list[LayerRule]:
        rules = (rule for layer in attention(self) for rule in rules_of(layer))
        return [rule for rule in rules if rule.restricts]

    def _read_by_rules(
        self, inputs: Mapping[str, Any], method: str = "generate"
    ) -> dict[str, Tensor]:
        """The mask inputs of the rules, taken from the inputs of `generate()` or `score()`."""
        rules, values = self._rules(), dict(inputs)
        names = sorted({name for rule in rules for name in rule.reads})
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


def _rows(x: Tensor, token_ids: Tensor, index: Any) -> Tensor:
    """A mask input; of a whole mask the rows of the queries `token_ids`, the first at `index`."""
    if len(x.shape) != 4:
        return x
    batch, heads, _, length = ops.shape(x)
    return ops.slice(x, (0, 0, index, 0), (batch, heads, ops.shape(token_ids)[1], length))


add_kind(GeneratesFromCache, "generate_step", "call_with_cache")
add_kind(Generates, "generate_step")
