"""The base of our attention layers: a rule, boolean masks, a config that holds the rule."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import scopes
from keras_headmask.attention.kernels import attend
from keras_headmask.attention.request import (
    Changes,
    Request,
    all_that_restricts,
    bound_to,
    checked_tiled,
    dropout_of,
)
from keras_headmask.layers import loading
from keras_headmask.layers.call_checks import (
    checked_attention_bias,
    checked_call,
    refuse_rule_and_ids,
    refuse_rule_by_position,
    supports_unknown_lengths,
)
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import config, evaluation
from keras_headmask.rules.base import MaskSpec, check_heads, check_spec, restricts
from keras_headmask.rules.leaves import Window

# What restricts from outside of the rule.
_MASKS = ("attention_mask", "query_mask", "value_mask", "key_mask")


class MaskedAttention(keras.Layer):
    """Stands before an attention class of Keras among the bases of one of our layers.

    `num_heads` are the heads that the rule names.
    """

    _restricts = _has_unknown_length = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = self._ours()
        refuse_rule_by_position(ours.__name__, kwargs)
        for name in _keras.ATTENTION_HOOKS:
            if getattr(type(self), name) is not getattr(ours, name):
                raise ValueError(
                    f"A subclass of {ours.__name__} must leave `{name}` as it is: that is where "
                    f"the rule holds. `{type(self).__name__}` overrides it. To read the "
                    "probabilities pass return_attention_scores=True; to restrict attention pass "
                    "an `attention_mask`; to compute it differently write a layer of your own, and "
                    "call `hm.make_mask` in it."
                )
        super().__init__(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_rule_and_ids(self._ours().__name__, args, kwargs)
        return super().__call__(*args, **kwargs)

    def _obey(
        self,
        mask_spec: MaskSpec | Mapping[str, Any] | None,
        tiled: bool | None,
        flash_attention: bool | None,
    ) -> None:
        """Keep what the constructor takes beside what Keras' class keeps."""
        # Keras folds the global default into its attribute and leaves it out of its config.
        self._flash_attention_argument = flash_attention
        if isinstance(mask_spec, Mapping) and not config.names_heads(mask_spec):
            mask_spec = MaskSpec.from_config(mask_spec)
        if mask_spec is not None:
            check_spec(mask_spec, "mask_spec", f"{self._ours().__name__}(..., mask_spec=SPEC)")
            assert isinstance(mask_spec, MaskSpec)
            num_key_heads = getattr(self, "num_key_value_heads", None)
            check_heads(mask_spec, self.num_heads, num_key_heads)
            self._restricts = restricts(mask_spec, self.num_heads)
            mask_spec.get_config()  # raises for a spec that could not be saved
        self._mask_spec = mask_spec
        self._tiled = checked_tiled(tiled)
        self._missed_weights = False  # see `loading`

    @classmethod
    def _ours(cls) -> type:
        """Our class, of which `cls` may be a subclass."""
        return next(base for base in cls.__mro__ if MaskedAttention in base.__bases__)

    def __repr__(self) -> str:
        return f"<{self._ours().__name__} name={self.name}, mask_spec={self._mask_spec!r}>"

    @property
    def supports_jit(self) -> bool:
        """Whether Keras may compile it by XLA: on TensorFlow, under a rule, for known lengths."""
        if self._restricts and self._has_unknown_length:
            return supports_unknown_lengths(self)
        return self._supports_jit

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        self._supports_jit = value

    @property
    def mask_spec(self) -> MaskSpec | None:
        """The rule this layer obeys, or `None`."""
        return self._mask_spec

    def get_config(self) -> dict[str, Any]:
        fields = super().get_config() | {
            "flash_attention": self._flash_attention_argument,
            "mask_spec": None if self._mask_spec is None else self._mask_spec.get_config(),
        }
        return fields if self._tiled is None else fields | {"tiled": self._tiled}

    def build(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> None:
        value_shape = query_shape if value_shape is None else value_shape
        super().build(query_shape, value_shape, key_shape)
        self._has_unknown_length = None in (*query_shape[1:-1], *value_shape[1:-1])
        # Or they would warn that they destroy the Keras mask of their input; the layer sees to it.
        *projections, _ = _keras.projections(self)
        for projection in filter(None, (*projections, _keras.gate(self))):
            projection.supports_masking = True

    def load_own_variables(self, store: Any) -> None:
        loading.check_is_built(self, store)
        super().load_own_variables(store)

    def call(
        self,
        query: Tensor,
        value: Tensor | None = None,
        key: Tensor | None = None,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        mask_inputs: Mapping[str, Any] | None = None,
        query_offset: Length | None = None,
        mask: Tensor | None = None,  # Keras' place for the query's mask if that is the only tensor
        attention_bias: Tensor | None = None,
    ) -> Any:
        if query_mask is None:
            query_mask = _keras.get_keras_mask(query) if mask is None else mask
        if value is None:
            value = query
            value_mask = query_mask if value_mask is None else value_mask
        key = value if key is None else key
        if masks.has_shape_alone(query):
            mask_inputs = loading.with_stand_ins(self._mask_spec, mask_inputs, query, value)
        outside = dict(zip(_MASKS, (attention_mask, query_mask, value_mask, key_mask), strict=True))
        window = self._window(use_causal_mask)
        offset = checked_call(self, query, value, window, mask_inputs, query_offset, outside)
        bias = checked_attention_bias(self, query, value, attention_bias)
        how = training, return_attention_scores
        if len(query.shape) != 3:
            return self._over_several_axes(query, value, key, outside, *how, use_causal_mask)
        projections = zip(_keras.projections(self)[:3], (query, key, value), strict=True)
        operands = [projection(x) for projection, x in projections]
        spec = None if scopes.are_rules_off() or not self._restricts else self._mask_spec
        rule, inputs = all_that_restricts(spec, mask_inputs, **outside, window=window)
        if self._uses_hook():
            mask = None if rule is None else self._mask(rule, inputs, query, value, offset)
            context, scores = self._by_hook(operands, mask, *how, bias)
        else:
            context, scores = self._by_kernel(operands, rule, inputs, offset, bias, *how)
        output = self._output(context, query, query_mask)
        return (output, scores) if return_attention_scores else output

    def _output(self, context: Tensor, query: Tensor, query_mask: Tensor | None) -> Tensor:
        gate, project = _keras.gate(self), _keras.projections(self)[3]
        output = project(context if gate is None else ops.multiply(context, gate(query)))
        if query_mask is not None:
            _keras.set_keras_mask(output, query_mask)
        return output

    def _over_several_axes(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor,
        outside: Mapping[str, Any],
        training: bool | None,
        wants_scores: bool,
        use_causal_mask: bool,
    ) -> Any:
        """By the `call` of stock Keras, which takes Keras masks off; they are put back."""
        kept = [(tensor, _keras.get_keras_mask(tensor)) for tensor in (query, value, key)]
        attention_mask, *of_tokens = (  # (Keras opens every integer but 0.)
            None if mask is None else masks.as_bool(mask, name) for name, mask in outside.items()
        )
        _keras.set_keras_mask(query, of_tokens[0])  # where stock looks for it
        try:
            rest = *of_tokens, attention_mask, wants_scores, training, use_causal_mask
            return super().call(query, value, key, *rest)
        finally:
            for tensor, mask in reversed(kept):
                _keras.set_keras_mask(tensor, mask)

    def _by_kernel(
        self,
        operands: list[Tensor],
        rule: MaskSpec | None,
        mask_inputs: dict[str, Any],
        offset: Length,
        bias: Tensor | None,
        training: bool | None,
        wants_scores: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Context and probabilities, by the code that suits `rule`, all that restricts."""
        if rule is None and bias is None:  # Keras' own may be a fused kernel
            return self._by_hook(operands, None, training, wants_scores)
        bound, (query, key, value) = None, operands
        if rule is not None:
            bound, query = bound_to(rule, mask_inputs, query, key, value, offset)
        request = Request(
            query,
            key,
            value,
            rule,
            bound,
            scale=_keras.scale(self),
            query_offset=offset,
            changes=Changes(bias=bias),
            wants_probabilities=wants_scores,
            tiled=None if wants_scores or bias is not None else self._tiled,
            **dropout_of(_keras.dropout_layer(self), training),
        )
        return attend(request)

    def _uses_hook(self) -> bool:
        """Whether `_compute_attention` gets a whole mask: flash, a rule of a model, an observer."""
        hook = _keras.COMPUTE_ATTENTION
        return _keras.flash(self) or hook in vars(self) or scopes.is_overridden(self, hook)

    def _by_hook(
        self,
        operands: list[Tensor],
        mask: Mask | None,
        training: bool | None,
        wants_scores: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Context and probabilities by `_compute_attention`, as Keras' `call` calls it."""
        more = {} if bias is None else {"attention_bias": bias}
        more |= {"training": training, "return_attention_scores": wants_scores}
        return self._compute_attention(*operands, attention_mask=mask, **more)

    def _by_mask(
        self,
        stock: Callable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None,
        training: bool | None,
        wants_scores: bool,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Context and probabilities under a whole mask, or by `stock`, Keras' own method."""
        # The stock fused kernel takes those with nothing to mask. Not in float16, where
        # TensorFlow's would round logits to at most 65504; nor with values of another size than
        # keys, which JAX's refuses.
        fused = attention_mask is None and not wants_scores and self.dropout == 0
        fused = fused and value.shape[-1] == key.shape[-1]
        fused = fused and keras.backend.standardize_dtype(query.dtype) != "float16"
        if (fused or scopes.uses_flash(self)) and bias is None:
            context, scores = stock(query, key, value, attention_mask, training, wants_scores)
            if attention_mask is not None:
                context = masks.zero_dead_rows(context, attention_mask)
            return context, scores
        return attend(
            Request(
                query,
                key,
                value,
                scale=_keras.scale(self),
                changes=Changes(bias=bias),
                wants_probabilities=wants_scores,
                mask=attention_mask,
                **dropout_of(_keras.dropout_layer(self), training),
            )
        )

    def _window(self, use_causal_mask: bool) -> MaskSpec | None:
        """The causal flag and the sliding window as a spec."""
        size = _keras.sliding_window(self)
        reach = None if size is None else size - 1
        if not use_causal_mask and reach is None:
            return None
        return Window(before=reach, after=0 if use_causal_mask else reach)

    def _mask(self, spec: MaskSpec, inputs: Any, query: Tensor, value: Tensor, offset: Any) -> Mask:
        (batch, queries), keys = masks.sizes(query)[:2], masks.sizes(value)[1]
        bound = evaluation.bind(spec, inputs, queries, keys, offset, batch=batch)
        return evaluation.mask_of_all_heads(spec, bound, self.num_heads)

    def _and_causal(self, mask: Mask | None, query: Tensor, key: Tensor) -> Mask:
        """`mask` and the causal mask: callers of `_compute_attention` may set Keras' flag."""
        causal = self._mask(Window(after=0), None, query, key, 0)
        both = masks.and_masks(mask, causal)
        assert both is not None
        return both

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any = None, key_shape: Any = None
    ) -> tuple:
        value_shape = query_shape if value_shape is None else value_shape
        return super().compute_output_shape(query_shape, value_shape, key_shape)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(MaskedAttention.call).bind(self, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        query, key = arguments["query"], arguments["key"]
        value = query if arguments["value"] is None else arguments["value"]
        outside = {name: arguments[name] for name in _MASKS}
        window = self._window(arguments["use_causal_mask"])
        reads = arguments["mask_inputs"], arguments["query_offset"]
        checked_call(self, query, value, window, *reads, outside)
        checked_attention_bias(self, query, value, arguments["attention_bias"])
        key_shape = None if key is None else key.shape
        shape = self.compute_output_shape(query.shape, value.shape, key_shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not arguments["return_attention_scores"]:
            return output
        axes = getattr(self, "attention_axes", None) or range(1, len(query.shape) - 1)
        batch = (size for i, size in enumerate(query.shape[:-1]) if i not in axes)
        of_axes = (x.shape[i] for x in (query, value) for i in axes)
        scores_shape = (*batch, self.num_heads, *of_axes)
        return output, keras.KerasTensor(scores_shape, dtype=self.compute_dtype)
