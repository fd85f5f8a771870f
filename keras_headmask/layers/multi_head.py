"""`keras.layers.MultiHeadAttention` with a mask for every head."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import scopes
from keras_headmask.layers import loading
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec


@keras.saving.register_keras_serializable(
    package="keras_headmask", name="PerHeadMaskedMultiHeadAttention"
)
class PerHeadMaskedMultiHeadAttention(MaskedAttention, keras.layers.MultiHeadAttention):
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
        attention_bias: Float, added to the logits, broadcastable to `(B, H, T, S)`: a shape of rank
            3 is `(H, T, S)`. It grades the allowed keys; a hidden one keeps probability 0.
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
        super().__init__(
            **_keras.stock_arguments(keras.layers.MultiHeadAttention, locals()), **kwargs
        )
        loading.change_keras("PerHeadMaskedMultiHeadAttention", "MultiHeadAttention")
        self._obey(mask_spec, tiled, flash_attention)

    @scopes.asking
    def _compute_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
        attention_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        stock = super(PerHeadMaskedMultiHeadAttention, scopes.as_seen(self))._compute_attention
        rest = training, return_attention_scores
        if len(query.shape) != 4:  # more than one attention axis
            more = {"use_causal_mask": True} if use_causal_mask else {}
            return stock(query, key, value, attention_mask, *rest, **more)
        if use_causal_mask:
            attention_mask = self._and_causal(attention_mask, query, key)
        return self._by_mask(stock, query, key, value, attention_mask, *rest, attention_bias)
