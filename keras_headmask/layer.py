"""`keras.layers.MultiHeadAttention` with a mask for every head."""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask._keras import get_keras_mask, set_keras_mask
from keras_headmask.attention import looking
from keras_headmask.attention.attend import Request, all_that_restricts, attend
from keras_headmask.rules import config, evaluation, heads
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.positions import Window

_warned: weakref.WeakSet = weakref.WeakSet()  # each layer or model warns once


def supports_unknown_lengths(holder: keras.Layer) -> bool:
    """Whether a layer or model under a rule may be compiled at lengths not known; why not, once."""
    if keras.backend.backend() != "tensorflow":
        return True
    if holder not in _warned:
        _warned.add(holder)
        warnings.warn(
            f"'{holder.name}' is not compiled by XLA (`jit_compile`): its lengths are not known, "
            "and XLA cannot skip what a rule hides by slices of unknown size. It runs in a "
            "TensorFlow graph. For XLA give `keras.Input` the length, as in "
            "`keras.Input((128,), dtype='int32')`.",
            UserWarning,
            stacklevel=3,
        )
    return False


def dropout_of(layer: keras.layers.MultiHeadAttention, training: bool | None) -> dict[str, Any]:
    """What a `Request` says of dropout in attention: nothing unless the layer is training."""
    if not (layer.dropout > 0 and training):
        return {}
    return {"dropout": layer.dropout, "seed": _keras.dropout_layer(layer).seed_generator}


_STOCK_MASKS = ("query_mask", "value_mask", "key_mask", "attention_mask")


# A list of layers is filed by class names: ours and stock's read each other's files under one.
_keras.file_weights_under("PerHeadMaskedMultiHeadAttention", "MultiHeadAttention")


@keras.saving.register_keras_serializable(
    package="keras_headmask", name="PerHeadMaskedMultiHeadAttention"
)
class PerHeadMaskedMultiHeadAttention(keras.layers.MultiHeadAttention):
    """Multi-head attention in which every head obeys its own mask.

    Without a rule it is `keras.layers.MultiHeadAttention`: same weights, names and outputs.
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
            (`False`); by default the faster of the two. Returned scores need all logits.
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
        return_attention_scores, training, use_causal_mask: As in Keras. The scores `(B, H, T, S)`
            are the probabilities before dropout.

    Raises:
        TypeError: for a float mask or float mask inputs, or a `mask_spec` that is no spec.
        ValueError: for shapes that do not fit, mask inputs missing or unknown, a head that
            `mask_spec` names and the layer lacks, or a rule with inputs of rank above 3.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence
    >>> full_stop = 9
    >>> layer = PerHeadMaskedMultiHeadAttention(
    ...     num_heads=4, key_dim=8, mask_spec=PerHead({0: SameSentence(full_stop)})
    ... )
    >>> x, token_ids = np.ones((1, 4, 16), "float32"), np.array([[5, 9, 6, 9]])
    >>> y, scores = layer(x, mask_inputs={"token_ids": token_ids}, return_attention_scores=True)
    >>> print(np.round(scores[0, 0], 2))
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
        super().__init__(
            num_heads,
            key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_shape=output_shape,
            attention_axes=attention_axes,
            flash_attention=flash_attention,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            seed=seed,
            **_keras.attention_arguments(sliding_window=sliding_window, use_gate=use_gate),
            **kwargs,
        )
        # Stock folds the global default into its attribute and leaves it out of its config.
        self._flash_attention_argument = flash_attention
        if isinstance(mask_spec, Mapping) and not config.names_heads(mask_spec):
            mask_spec = MaskSpec.from_config(mask_spec)
        if mask_spec is not None:
            called = "PerHeadMaskedMultiHeadAttention(..., mask_spec=SPEC)"
            check_spec(mask_spec, "mask_spec", called)
            self._restricts = heads.restricts(mask_spec, num_heads)
            mask_spec.get_config()  # a spec that could not be saved is told here
        else:
            self._restricts = False
        self._mask_spec = mask_spec
        if tiled is not None and not isinstance(tiled, bool):
            raise TypeError(f"`tiled` must be True, False or None. Received: {tiled!r}.")
        self._tiled = tiled
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
        lengths = query_shape[1:-1], value_shape[1:-1]
        self._has_unknown_length = any(None in of_side for of_side in lengths)
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
        query: Any,
        value: Any = None,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        mask_inputs: Mapping[str, Any] | None = None,
        query_offset: Any = None,
        mask: Any = None,  # where Keras puts the query's mask if the query is the only tensor
    ) -> Any:
        if query_mask is None:
            query_mask = get_keras_mask(query) if mask is None else mask
        if value is None:
            value = query
            value_mask = query_mask if value_mask is None else value_mask
        key = value if key is None else key
        if masks.has_shape_alone(query):
            mask_inputs = self._with_stand_ins(mask_inputs, query, value)
        query_offset = self._given_offset(query, value, use_causal_mask, query_offset)
        stock_masks = (query_mask, value_mask, key_mask, attention_mask)
        self._check_call(query, value, stock_masks, mask_inputs, query_offset)
        if len(query.shape) != 3:
            with _masks_kept(query, value, key):
                set_keras_mask(query, query_mask)  # where stock looks for it
                return super().call(
                    query,
                    value,
                    key,
                    value_mask=value_mask,
                    key_mask=key_mask,
                    attention_mask=attention_mask,
                    return_attention_scores=return_attention_scores,
                    training=training,
                    use_causal_mask=use_causal_mask,
                )
        gate = _keras.gate(self)
        projected = self.query_dense(query), self.key_dense(key), self.value_dense(value)
        if self._has_hooks():
            merged = self._merged_mask(
                query, value, stock_masks, use_causal_mask, mask_inputs, query_offset
            )
            context, scores = self._compute_attention(
                *projected, merged, training, return_attention_scores
            )
        else:
            context, scores = self._attend(
                projected,
                all_that_restricts(
                    self._mask_spec if self._obeys else None,
                    mask_inputs,
                    attention_mask,
                    query_mask,
                    value_mask,
                    key_mask,
                    self._window(use_causal_mask),
                ),
                query_offset,
                training,
                return_attention_scores,
            )
        output = self.output_dense(context if gate is None else ops.multiply(context, gate(query)))
        if query_mask is not None:
            set_keras_mask(output, query_mask)
        return (output, scores) if return_attention_scores else output

    def _with_stand_ins(self, mask_inputs: Any, query: Any, value: Any) -> Any:
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

    def _given_offset(
        self, query: Any, value: Any, use_causal_mask: bool, query_offset: Any
    ) -> Any:
        if query_offset is not None or len(query.shape) != 3:
            return evaluation.checked_offset(0 if query_offset is None else query_offset)
        spec, window = self._mask_spec, self._window(use_causal_mask)
        if window is not None:
            spec = window if spec is None else spec & window
        return evaluation.given_offset(None, spec, query.shape[1], value.shape[1])

    def _has_hooks(self) -> bool:
        """Whether a subclass computes attention or masks itself, or a flash kernel is asked for.

        Or whether the caller looks at what is computed.
        """
        ours = PerHeadMaskedMultiHeadAttention
        special = _keras.flash(self) or looking.is_overridden(self, _keras.COMPUTE_ATTENTION)
        return bool(special) or any(
            getattr(getattr(self, hook), "__func__", None) is not getattr(ours, hook)
            for hook in _keras.ATTENTION_HOOKS
        )

    @property
    def _obeys(self) -> bool:
        return self._restricts and not looking.are_rules_off()

    def _attend(
        self,
        projected: tuple,
        restricts: tuple,
        query_offset: Any,
        training: bool | None,
        return_attention_scores: bool,
    ) -> tuple[Any, Any]:
        """The context, and the probabilities (`None` where they are not computed)."""
        query, key, _ = projected
        rule, inputs = restricts
        if rule is None:
            return self._compute_attention(*projected, None, training, return_attention_scores)
        queries, keys = ops.shape(query)[1], ops.shape(key)[1]
        return attend(
            Request(
                *projected,
                rule,
                evaluation.bind(rule, inputs, queries, keys, query_offset),
                scale=_keras.scale(self),
                query_offset=query_offset,
                wants_probabilities=return_attention_scores,
                tiled=None if return_attention_scores else self._tiled,
                **dropout_of(self, training),
            )
        )

    def _window(self, use_causal_mask: bool) -> MaskSpec | None:
        """The causal flag and the sliding window as a spec."""
        size = _keras.sliding_window(self)
        reach = None if size is None else size - 1
        if not use_causal_mask and reach is None:
            return None
        return Window(before=reach, after=0 if use_causal_mask else reach)

    def _merged_mask(
        self,
        query: Any,
        value: Any,
        stock_masks: tuple,
        use_causal_mask: bool,
        mask_inputs: Any,
        query_offset: Any,
    ) -> Any:
        """Everything that restricts, ANDed: boolean of rank 4, or `None`.

        What comes from outside the spec is ANDed after it, so that no `~` or `|` inside reopens it.
        """
        mask = None
        if self._obeys:
            queries, keys = ops.shape(query)[1], ops.shape(value)[1]
            bound = evaluation.bind(self._mask_spec, mask_inputs, queries, keys, query_offset)
            mask = evaluation.mask_of_all_heads(self._mask_spec, bound, self.num_heads)
        # The offset is passed only where there is one, for subclasses with Keras' own signature.
        stays = isinstance(query_offset, int) and query_offset == 0
        offset = {} if stays else {"query_offset": query_offset}
        stock = dict(zip(_STOCK_MASKS, stock_masks, strict=True))
        stock_mask = self._compute_attention_mask(
            query, value, **stock, use_causal_mask=use_causal_mask, **offset
        )
        return masks.and_masks(mask, stock_mask)

    def _compute_attention_mask(
        self,
        query: Any,
        value: Any,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
        query_offset: Any = 0,
    ) -> Any:
        """What Keras merges here, each lifted to rank 4 before it meets the others."""
        if len(query.shape) != 3:
            return super()._compute_attention_mask(
                query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
            )
        parts = [None if attention_mask is None else masks.lift(attention_mask, "attention_mask")]
        if query_mask is not None:
            parts.append(masks.as_bool(query_mask, "query_mask")[:, None, :, None])
        for name, mask in (("value_mask", value_mask), ("key_mask", key_mask)):
            if mask is not None:
                parts.append(masks.as_bool(mask, name)[:, None, None, :])
        if isinstance(query_offset, int) and query_offset == 0:  # Keras' own hooks know no offset
            if use_causal_mask:
                parts.append(_keras.causal_mask(self, query, value))
            if _keras.sliding_window(self) is not None:
                parts.append(_keras.sliding_window_mask(self, query, value))
        elif (window := self._window(use_causal_mask)) is not None:
            queries, keys = ops.shape(query)[1], ops.shape(value)[1]
            parts.append(evaluation.make_mask(window, queries, keys, query_offset=query_offset))
        return masks.and_masks(*parts)

    @looking.asks
    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        arguments = (attention_mask, training, return_attention_scores, use_causal_mask)
        usual = self._usual_attention
        return looking.run(self, _keras.COMPUTE_ATTENTION, usual, query, key, value, *arguments)

    def _usual_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        stock = super(PerHeadMaskedMultiHeadAttention, looking.as_seen(self))._compute_attention
        if len(query.shape) != 4:  # more than one attention axis
            stock_arguments = (attention_mask, training, return_attention_scores)
            causal = (True,) if use_causal_mask else ()  # which Keras before 3.15 does not know
            return stock(query, key, value, *stock_arguments, *causal)
        if use_causal_mask:
            causal = evaluation.make_mask(Window(after=0), ops.shape(query)[1], ops.shape(key)[1])
            attention_mask = masks.and_masks(attention_mask, causal)
        if self._is_left_to_stock(query, attention_mask, return_attention_scores):
            context, scores = stock(
                query, key, value, attention_mask, training, return_attention_scores
            )
            if attention_mask is not None:
                context = masks.zero_dead_rows(context, attention_mask)
            return context, scores

        return attend(
            Request(
                query,
                key,
                value,
                scale=_keras.scale(self),
                make_mask=lambda: attention_mask,
                **dropout_of(self, training),
            )
        )

    def _is_left_to_stock(self, query: Any, mask: Any, return_scores: bool) -> bool:
        """Flash attention, a softmax of a subclass's own, the fused kernel with nothing to mask.

        Not in float16, where TensorFlow's kernel would round scores to at most 65504; nor with
        values of another size than keys, which JAX's kernel refuses.
        """
        if looking.uses_flash(self) or _keras.has_own_softmax(self):
            return True
        fused = not return_scores and self.dropout == 0 and self.value_dim == self.key_dim
        return fused and mask is None and keras.backend.standardize_dtype(query.dtype) != "float16"

    def _check_call(
        self, query: Any, value: Any, stock_masks: tuple, mask_inputs: Any, query_offset: Any
    ) -> None:
        """All that dtypes and static shapes can tell is wrong with a call."""
        query_mask, value_mask, key_mask, attention_mask = stock_masks
        if attention_mask is not None:
            attention_mask = masks.as_tensor(attention_mask)
            masks.as_bool(attention_mask, "attention_mask")
        if len(query.shape) != 3:
            if mask_inputs or not (isinstance(query_offset, int) and query_offset == 0):
                raise ValueError(
                    "`mask_inputs` and `query_offset` speak of one axis of queries and one of keys:"
                    " the inputs must have shape (batch, length, size). Received: "
                    f"query.shape={tuple(query.shape)}."
                )
            if self._mask_spec is not None:
                raise ValueError(
                    "A mask spec speaks of one axis of queries and one of keys: the inputs must "
                    "have shape (batch, length, size). Received: "
                    f"query.shape={tuple(query.shape)}. Flatten the attention axes, or leave "
                    "`mask_spec` out."
                )
            return
        batch, queries = query.shape[:2]
        lengths = evaluation.Lengths(batch, self.num_heads, queries, value.shape[1])
        _check_keras_mask("query_mask", query_mask, batch, queries)
        _check_keras_mask("value_mask", value_mask, batch, lengths.keys)
        _check_keras_mask("key_mask", key_mask, batch, lengths.keys)
        if attention_mask is not None:
            masks.check_shape(attention_mask, "attention_mask", *lengths)
        evaluation.check_inputs(self._mask_spec, mask_inputs, lengths, query_offset)

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any = None, key_shape: Any = None
    ) -> tuple:
        value_shape = query_shape if value_shape is None else value_shape
        return super().compute_output_shape(query_shape, value_shape, key_shape)

    def compute_output_spec(
        self,
        query: Any,
        value: Any = None,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        mask_inputs: Mapping[str, Any] | None = None,
        query_offset: Any = None,
        mask: Any = None,
    ) -> Any:
        value = query if value is None else value
        query_offset = self._given_offset(query, value, use_causal_mask, query_offset)
        stock_masks = (query_mask, value_mask, key_mask, attention_mask)
        self._check_call(query, value, stock_masks, mask_inputs, query_offset)
        key_shape = None if key is None else key.shape
        shape = self.compute_output_shape(query.shape, value.shape, key_shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        axes = self.attention_axes or range(1, len(query.shape) - 1)
        batch_axes = [i for i in range(len(query.shape) - 1) if i not in axes]
        scores_shape = (
            *(query.shape[i] for i in batch_axes),
            self.num_heads,
            *(query.shape[i] for i in axes),
            *(value.shape[i] for i in axes),
        )
        return output, keras.KerasTensor(scores_shape, dtype=self.compute_dtype)


def _check_keras_mask(name: str, mask: Any, batch: int | None, length: int | None) -> None:
    """A Keras mask is `(batch, length)`; sizes not known yet pass."""
    if mask is None:
        return
    shape = tuple(masks.as_tensor(mask).shape)
    fits = len(shape) == 2 and all(
        size is None or wanted is None or size in (1, wanted)
        for size, wanted in zip(shape, (batch, length), strict=True)
    )
    if not fits:
        raise ValueError(
            f"`{name}` must have shape (batch, length) = ({batch}, {length}), true at real tokens. "
            f"Received: shape {shape}. A mask with an axis of queries is an `attention_mask`."
        )
    masks.as_bool(mask, name)  # refuses floats, and an additive mask of integers


@contextlib.contextmanager
def _masks_kept(*tensors: Any) -> Iterator[None]:
    """Put the Keras masks back where stock's `call` takes them off."""
    kept = [(tensor, get_keras_mask(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, mask in reversed(kept):
            set_keras_mask(tensor, mask)
