"""`keras.layers.GroupQueryAttention` with a mask for every query head."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import scopes
from keras_headmask.layers import loading
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec


@keras.saving.register_keras_serializable(
    package="keras_headmask", name="PerHeadMaskedGroupedQueryAttention"
)
class PerHeadMaskedGroupedQueryAttention(MaskedAttention, keras.layers.GroupQueryAttention):
    """Grouped-query attention in which every query head obeys its own mask.

    Without a rule it is `keras.layers.GroupQueryAttention`: same weights, weight names, outputs.
    Query head h reads key head h // (`num_query_heads` / `num_key_value_heads`). A rule names query
    heads, so heads that share keys may obey different rules. The tiled implementation does not
    repeat the keys in memory. All else is as in `PerHeadMaskedMultiHeadAttention`: what restricts
    is merged by AND, a hidden key has probability exactly 0, a query with no allowed key gets
    context exactly 0.

    Args:
        head_dim: Size of each head.
        num_query_heads: Number of heads of the query, H.
        num_key_value_heads: Number of heads of keys and values; divides H.
        mask_spec: Which keys each query may attend to: a `MaskSpec`, its config (a dict), or `None`
            for no rule. `PerHead` names query heads, 0 to H - 1.
        tiled: Whether to skip masked-out work, tile by tile (`True`), or to compute all logits
            (`False`); by default the faster of the two. Returned probabilities need all logits.
        dropout, ..., seed: As in `keras.layers.GroupQueryAttention`.
        **kwargs: `name`, `dtype` and whatever else a Keras layer takes.

    Call arguments:
        query: `(B, T, dim)`.
        value: `(B, S, dim)`; `None` for self-attention, where value and its Keras mask are the
            query's.
        key: `(B, S, dim)`; the value by default.
        query_mask, ..., use_causal_mask: As in `PerHeadMaskedMultiHeadAttention`, and so are
            `mask_inputs`, `query_offset` and `attention_bias`. Masks of rank 4 and returned
            probabilities have an axis of query heads.

    Raises:
        TypeError: for a float mask or float mask inputs, or a `mask_spec` that is not a spec.
        ValueError: for shapes that do not fit, mask inputs missing or unknown, a head that
            `mask_spec` names and the query lacks, or `num_key_value_heads` that does not divide
            `num_query_heads`.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, Window
    >>> layer = PerHeadMaskedGroupedQueryAttention(
    ...     8, num_query_heads=4, num_key_value_heads=2, mask_spec=PerHead({3: Window(0, 0)})
    ... )
    >>> y, probabilities = layer(np.ones((1, 2, 16), "float32"), return_attention_scores=True)
    >>> print(np.round(probabilities[0, 2:], 2))
    [[[0.5 0.5]
      [0.5 0.5]]
    <BLANKLINE>
     [[1.  0. ]
      [0.  1. ]]]
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
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
        stock = keras.layers.GroupQueryAttention
        super().__init__(**_keras.stock_arguments(stock, locals()), **kwargs)
        loading.change_keras("PerHeadMaskedGroupedQueryAttention", "GroupedQueryAttention")
        self._obey(mask_spec, tiled, flash_attention)

    @property
    def num_heads(self) -> int:
        """The heads of the query, which a rule numbers."""
        return self.num_query_heads

    def _by_hook(
        self,
        operands: list[Tensor],
        mask: Mask | None,
        training: bool | None,
        wants_scores: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        query, *of_keys = operands
        every = [ops.repeat(x, self.num_repeats, axis=2) for x in of_keys]
        return super()._by_hook([query, *every], mask, training, wants_scores, bias)

    @scopes.asking
    def _compute_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None = None,
        training: bool | None = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool | None = None,
        attention_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        seen, wants_scores = scopes.as_seen(self), return_attention_scores
        wants_scores = _keras.wants_scores(self) if wants_scores is None else wants_scores
        if use_causal_mask:
            attention_mask = self._and_causal(attention_mask, query, key)

        def stock(*arguments: Any) -> tuple[Tensor, Tensor | None]:
            *others, wanted = arguments
            _keras.want_scores(seen, wanted)
            return super(PerHeadMaskedGroupedQueryAttention, seen)._compute_attention(*others)

        rest = training, wants_scores, attention_bias
        return self._by_mask(stock, query, key, value, attention_mask, *rest)
