"""`keras.layers.MultiHeadAttention` with a mask for every head."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.attention.attend import Request, all_that_restricts, attend
from keras_headmask.attention.checking import (
    checked_call,
    checked_tiled,
    is_zero,
    supports_unknown_lengths,
)
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import config, evaluation, heads
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.positions import Window


def dropout_of(layer: keras.layers.MultiHeadAttention, training: bool | None) -> dict[str, Any]:
    """What a `Request` says of dropout in attention: nothing unless the layer is training."""
    if not (layer.dropout > 0 and training):
        return {}
    return {"dropout": layer.dropout, "seed": _keras.dropout_layer(layer).seed_generator}


# What restricts from outside of the rule.
_MASKS = ("attention_mask", "query_mask", "value_mask", "key_mask")

# A list of layers is filed by class name: under one, this and Keras' layer share their files.
_keras.file_weights_under("PerHeadMaskedMultiHeadAttention", "MultiHeadAttention")


@keras.saving.register_keras_serializable(
    package="keras_headmask", name="PerHeadMaskedMultiHeadAttention"
)
class PerHeadMaskedMultiHeadAttention(keras.layers.MultiHeadAttention):
    """Multi-head attention in which every head obeys its own mask.

    Without a rule it is `keras.layers.MultiHeadAttention`: same weights, weight names, outputs.
    Whatever restricts (the rule, `attention_mask`, Keras masks, `use_causal_mask`,
    `sliding_window`) is merged by AND as booleans `(batch, heads, queries, keys)`, `True` = may
    attend, and applied by adding -1e9 once before the softmax, in at least float32. A hidden key
    has probability exactly 0; a query with no allowed key gets context exactly 0. Keras masks stay
    on the caller's tensors.

    Args:
        num_heads: Number of heads, H.
        key_dim: Size of each head for query and key.
        mask_spec: Which keys each query may attend to: a `MaskSpec`, its config (a dict), or `None`
            for no rule.
        tiled: Whether to skip masked-out work, tile by tile (`True`), or to compute all logits
            (`False`); by default the faster of the two. Returned probabilities need all logits.
        value_dim, dropout, ..., seed: As in `keras.layers.MultiHeadAttention`.
        **kwargs: `name`, `dtype` and whatever else a Keras layer takes.

    Call arguments:
        query: `(B, T, dim)`.
        value: `(B, S, dim)`; `None` for self-attention, where value and its Keras mask are the
            query's.
        key: `(B, S, dim)`; the value by default.
        query_mask, value_mask, key_mask: `(B, T)`, `(B, S)`, `(B, S)`, true at real tokens. Filled
            in from the tensors' Keras masks.
        attention_mask: Boolean or integer, `(T, S)`, `(B, T, S)` or `(B or 1, H or 1, T, S)`.
        mask_inputs: The tensors that `mask_spec` reads, by name: integer or boolean `(B, length)`,
            or a pair `(query_side, key_side)` for cross-attention.
        query_offset: Query i stands at position i + `query_offset`, key j at j; for the rule, the
            causal mask and the sliding window. An int or an integer scalar tensor. Left out it is
            0, with a warning where one of these meets fewer queries than keys: a step with a cache
            of keys needs it.
        return_attention_scores, training, use_causal_mask: As in Keras. What is returned are the
            probabilities `(B, H, T, S)` before dropout.

    Raises:
        TypeError: for a float mask or float mask inputs, or a `mask_spec` that is not a spec.
        ValueError: for shapes that do not fit, mask inputs missing or unknown, a head that
            `mask_spec` names and the layer lacks, or a rule with inputs of rank above 3.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence
    >>> full_stop = 9
    >>> layer = PerHeadMaskedMultiHeadAttention(
    ...     num_heads=4, key_dim=8, mask_spec=PerHead({0: SameSentence(full_stop)})
    ... )
    >>> x, inputs = np.ones((1, 4, 16), "float32"), {"token_ids": np.array([[5, 9, 6, 9]])}
    >>> y, probabilities = layer(x, mask_inputs=inputs, return_attention_scores=True)
    >>> print(np.round(probabilities[0, 0], 2))
    [[0.5 0.5 0.  0. ]
     [0.5 0.5 0.  0. ]
     [0.  0.  0.5 0.5]
     [0.  0.  0.5 0.5]]
    """

    _restricts = _has_unknown_length = False

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        use_gate: bool = False,
        seed: int | None = None,
        mask_spec: MaskSpec | Mapping[str, Any] | None = None,
        tiled: bool | None = None,
        **kwargs: Any,
    ):
        super().__init__(**_keras.stock_arguments(locals()), **kwargs)
        # Keras folds the global default into its attribute and leaves it out of its config.
        self._flash_attention_argument = flash_attention
        if isinstance(mask_spec, Mapping) and not config.names_heads(mask_spec):
            mask_spec = MaskSpec.from_config(mask_spec)
        if mask_spec is not None:
            called = "PerHeadMaskedMultiHeadAttention(..., mask_spec=SPEC)"
            check_spec(mask_spec, "mask_spec", called)
            assert isinstance(mask_spec, MaskSpec)
            self._restricts = heads.restricts(mask_spec, num_heads)
            mask_spec.get_config()  # raises for a spec that could not be saved
        self._mask_spec = mask_spec
        self._tiled = checked_tiled(tiled)
        self._missed_weights = False  # whether a file held weights before it was built

    def __repr__(self) -> str:
        return f"<PerHeadMaskedMultiHeadAttention name={self.name}, mask_spec={self._mask_spec!r}>"

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
        projections = self.query_dense, self.key_dense, self.value_dense, _keras.gate(self)
        for projection in filter(None, projections):
            projection.supports_masking = True

    def load_own_variables(self, store: Any) -> None:
        # Keras passes over the projections of a layer that it could not build, in silence.
        if not self.built and _keras.has_in_file(store, "query_dense"):
            self._missed_weights = True
        if not self.built and self._missed_weights:  # asked again, by a path that no file has
            raise ValueError(
                f"The layer '{self.name}' was not built, so the weights that the file holds for it "
                "would be lost. Keras could not run the `call` of the model that holds it: pass "
                "all tensors in the first argument, a dict or a list, or define "
                "`build_from_config`. To load weights into a model made by hand, call it on data "
                "first."
            )
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
    ) -> Any:
        if query_mask is None:
            query_mask = _keras.get_keras_mask(query) if mask is None else mask
        if value is None:
            value = query
            value_mask = query_mask if value_mask is None else value_mask
        key = value if key is None else key
        if masks.has_shape_alone(query):
            mask_inputs = self._with_stand_ins(mask_inputs, query, value)
        given = attention_mask, query_mask, value_mask, key_mask
        outside: dict[str, Any] = dict(zip(_MASKS, given, strict=True))
        window = self._window(use_causal_mask)
        asked = self.num_heads, self._mask_spec, window, mask_inputs, query_offset
        offset = checked_call(query, value, *asked, outside)
        if len(query.shape) != 3:
            # Stock's `call`, for several axes, takes Keras masks off, which are put back.
            kept = [(tensor, _keras.get_keras_mask(tensor)) for tensor in (query, value, key)]
            _keras.set_keras_mask(query, query_mask)  # where stock looks for it
            rest = query_mask, value_mask, key_mask, attention_mask
            try:
                return super().call(
                    query, value, key, *rest, return_attention_scores, training, use_causal_mask
                )
            finally:
                for tensor, mask in reversed(kept):
                    _keras.set_keras_mask(tensor, mask)
        operands = self.query_dense(query), self.key_dense(key), self.value_dense(value)
        spec = None if looking.are_rules_off() or not self._restricts else self._mask_spec
        rule = merged = None
        if not self._has_hooks():
            rule, inputs = all_that_restricts(spec, mask_inputs, **outside, window=window)
        else:  # everything that restricts, ANDed: what comes from outside after the spec
            if spec is not None:
                merged = self._mask(spec, mask_inputs, query, value, offset)
            outside["use_causal_mask"] = use_causal_mask
            if not is_zero(offset):  # which a subclass with Keras' own signature does not know
                outside["query_offset"] = offset
            merged = masks.and_masks(merged, self._compute_attention_mask(query, value, **outside))
        if rule is None:
            context, scores = self._compute_attention(
                *operands, merged, training, return_attention_scores
            )
        else:
            queries, keys = (ops.shape(x)[1] for x in operands[:2])
            request = Request(
                *operands,
                rule,
                evaluation.bind(rule, inputs, queries, keys, offset),
                scale=_keras.scale(self),
                query_offset=offset,
                wants_probabilities=return_attention_scores,
                tiled=None if return_attention_scores else self._tiled,
                **dropout_of(self, training),
            )
            context, scores = attend(request)
        gate = _keras.gate(self)
        output = self.output_dense(context if gate is None else ops.multiply(context, gate(query)))
        if query_mask is not None:
            _keras.set_keras_mask(output, query_mask)
        return (output, scores) if return_attention_scores else output

    def _with_stand_ins(self, mask_inputs: Any, query: Tensor, value: Tensor) -> Any:
        """`mask_inputs`, with zeros for those that a loading Keras leaves out of a model's call.

        A file holds no shapes of nested arguments. An error would be swallowed, and the layers that
        come after this one would keep fresh weights.
        """
        is_mapping = mask_inputs is None or isinstance(mask_inputs, Mapping)
        if self._mask_spec is None or not is_mapping or len(query.shape) != 3:
            return mask_inputs  # the checks say what is wrong
        sides = tuple(ops.cast(ops.zeros_like(x[..., 0]), "int32") for x in (query, value))
        missing = {
            name: sides if kind.rank is not None else sides[0][:1, :1]
            for name, kind in self._mask_spec.inputs.items()
        }
        given = {k: v for k, v in (mask_inputs or {}).items() if v is not None}
        return missing | given or mask_inputs

    def _has_hooks(self) -> bool:
        """Whether `_compute_attention` must run: for a subclass, a flash kernel, or who looks."""
        ours = PerHeadMaskedMultiHeadAttention
        special = _keras.flash(self) or looking.is_overridden(self, _keras.COMPUTE_ATTENTION)
        return bool(special) or any(
            getattr(getattr(self, hook), "__func__", None) is not getattr(ours, hook)
            for hook in _keras.ATTENTION_HOOKS
        )

    def _window(self, use_causal_mask: bool) -> MaskSpec | None:
        """The causal flag and the sliding window as a spec."""
        size = _keras.sliding_window(self)
        reach = None if size is None else size - 1
        if not use_causal_mask and reach is None:
            return None
        return Window(before=reach, after=0 if use_causal_mask else reach)

    def _mask(self, spec: MaskSpec, inputs: Any, query: Tensor, value: Tensor, offset: Any) -> Mask:
        bound = evaluation.bind(spec, inputs, ops.shape(query)[1], ops.shape(value)[1], offset)
        return evaluation.mask_of_all_heads(spec, bound, self.num_heads)

    def _compute_attention_mask(
        self,
        query: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_causal_mask: bool = False,
        query_offset: Length = 0,
    ) -> Mask | None:
        """What Keras merges here, each lifted to rank 4 before it meets the others."""
        of_tokens = query_mask, value_mask, key_mask
        stock = super()._compute_attention_mask
        if len(query.shape) != 3:
            return stock(query, value, *of_tokens, attention_mask, use_causal_mask)
        if is_zero(query_offset):  # Keras' own hooks know no other
            merged = stock(query, value, *of_tokens, use_causal_mask=use_causal_mask)
            return masks.and_masks(attention_mask, merged)
        window = self._window(use_causal_mask)
        rule, inputs = all_that_restricts(None, None, attention_mask, *of_tokens, window)
        return None if rule is None else self._mask(rule, inputs, query, value, query_offset)

    @looking.asking
    def _compute_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        stock = super(PerHeadMaskedMultiHeadAttention, looking.as_seen(self))._compute_attention
        flags = training, return_attention_scores
        if len(query.shape) != 4:  # more than one attention axis
            return stock(query, key, value, attention_mask, *flags)
        # The stock fused kernel takes those with nothing to mask. Not in float16, where
        # TensorFlow's would round logits to at most 65504; nor with values of another size than
        # keys, which JAX's refuses.
        fused = attention_mask is None and not return_attention_scores and self.dropout == 0
        fused = fused and self.value_dim == self.key_dim
        fused = fused and keras.backend.standardize_dtype(query.dtype) != "float16"
        if fused or looking.uses_flash(self) or _keras.has_own_softmax(self):
            context, scores = stock(query, key, value, attention_mask, *flags)
            if attention_mask is not None:
                context = masks.zero_dead_rows(context, attention_mask)
            return context, scores
        more = {"scale": _keras.scale(self)} | dropout_of(self, training)
        return attend(Request(query, key, value, make_mask=lambda: attention_mask, **more))

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any = None, key_shape: Any = None
    ) -> tuple:
        value_shape = query_shape if value_shape is None else value_shape
        return super().compute_output_shape(query_shape, value_shape, key_shape)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(PerHeadMaskedMultiHeadAttention.call).bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        query, key = given["query"], given["key"]
        value = query if given["value"] is None else given["value"]
        outside = {name: given[name] for name in _MASKS}
        window = self._window(given["use_causal_mask"])
        asked = self.num_heads, self._mask_spec, window, given["mask_inputs"], given["query_offset"]
        checked_call(query, value, *asked, outside)
        key_shape = None if key is None else key.shape
        shape = self.compute_output_shape(query.shape, value.shape, key_shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not given["return_attention_scores"]:
            return output
        axes = self.attention_axes or range(1, len(query.shape) - 1)
        batch = (size for i, size in enumerate(query.shape[:-1]) if i not in axes)
        of_axes = (x.shape[i] for x in (query, value) for i in axes)
        scores_shape = (*batch, self.num_heads, *of_axes)
        return output, keras.KerasTensor(scores_shape, dtype=self.compute_dtype)
