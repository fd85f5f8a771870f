"""A rule bound for one forward of a model.

The model's `call` prepares what the rules read and binds it; inside, each attention layer finds the
binding when it computes. No binding, no attention: a layer that runs outside its model is an error,
and so is a rule that no layer used.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.attention.attend import all_that_restricts, dense_attention, way_is_tiled
from keras_headmask.attention.tiling import tiled_attention
from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
from keras_headmask.retrofit.layer_rules import LayerRule
from keras_headmask.rules import evaluation
from keras_headmask.rules.positions import Window


class Plan:
    """The rules of one model. Holds what is bound while the model runs, for each thread."""

    def __init__(self, model_name: str, rules: list[LayerRule]):
        self.model_name = model_name
        self.rules = {id(rule.layer): rule for rule in rules}
        self.replaced: set[int] = set()  # layers that an outer model's rule took over
        self.running = _Running()

    @property
    def reads_inputs(self) -> list[str]:
        return sorted({name for rule in self.rules.values() for name in rule.spec.inputs})

    @contextlib.contextmanager
    def bound(
        self, tensors: Mapping[str, Any], query_offset: Any = 0, whole: bool = True
    ) -> Iterator[None]:
        """Evaluate what the rules read and keep it for the layers; then see that they used it.

        With `whole=False` it is a part of a forward, in which not all layers run: see `in_parts`.
        """
        binding = Binding(self, tensors, query_offset)
        with self.running.having(binding=binding):
            yield
        if whole:
            self._check_used(binding.used)
        else:
            self.running.used_in_parts |= binding.used

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """A forward of several `bound`, at whose end all rules must have been used."""
        with self.running.having(used_in_parts=set()):
            yield
            self._check_used(self.running.used_in_parts)

    def _check_used(self, used: Set[int]) -> None:
        unused = [r for i, r in self.rules.items() if i not in used | self.replaced]
        if unused and not _keras.in_symbolic_scope():
            raise RuntimeError(
                f"The rule of the attention layer {unused[0].entry} was not used in this forward "
                f"of the model '{self.model_name}': either the layer did not run, or its class "
                "computes attention without `_compute_attention`. Leave it out by `layers=`."
            )


class _Running(threading.local):
    """What a model is doing, in each thread: one may save it while others call it."""

    binding: "Binding | None" = None  # None outside the model
    used_in_parts: Set[int] = frozenset()  # the layers that parts of a forward ran so far
    only_shapes = False  # whether it runs for the shapes of its outputs alone, without a rule
    wide_ids: dict[str, Any] | None = None  # inputs of 64 bits, by name, which the model casts
    in_config = False  # whether its own config is made, which holds the rules beside its layers

    @contextlib.contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Set these in this thread for a while."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class Binding:
    """The rules of a plan for one forward: the mask inputs, and what was made of them so far."""

    def __init__(self, plan: Plan, tensors: Mapping[str, Any], query_offset: Any):
        self.plan, self.tensors, self.query_offset = plan, tensors, query_offset
        self.used: set[int] = set()
        self._graph = _graph()
        self._bounds: dict[Any, evaluation.Bound] = {}
        self._masks: dict[Any, Any] = {}
        for rule in plan.rules.values():
            self._prepare(rule)

    def _prepare(self, rule: LayerRule) -> None:
        """Bind a rule that reads ids before any layer runs: so all share it, in any scope.

        (A tensor made inside a rematerialised layer may not leave it.)
        """
        key = _key(rule)
        kinds = rule.spec.inputs
        names = [name for name in kinds if kinds[name].rank is not None]
        if not _is_obeyed(rule) or not names or key in self._bounds:
            return
        given = rule.given(self.tensors)
        lengths = dict.fromkeys(("query", "key"))
        for name in names:
            pair = evaluation.as_pair(given[name]) or (given[name], given[name])
            for side, tensor in zip(lengths, pair, strict=True):
                if tensor is not None and lengths[side] is None:
                    lengths[side] = ops.shape(tensor)[1]
        if None in lengths.values():
            return  # of a cross-attention that reads one side: known when the layer runs
        self._bounds[key] = evaluation.bind(rule.spec, given, *lengths.values())

    def attend(self, rule: LayerRule, compute: Callable, arguments: Mapping[str, Any]) -> Any:
        """Context and scores of one layer under its rule; `compute` is what it would do without."""
        check_not_in_own_function(rule, self._graph)
        self.used.add(id(rule.layer))
        if not _is_obeyed(rule):
            return compute(**arguments)
        query, key, value = (arguments[name] for name in ("query", "key", "value"))
        if len(query.shape) != 4:
            raise ValueError(
                f"The attention layer {rule.entry} attends over several axes: a mask spec speaks "
                "of one axis of queries and one of keys. Leave it out by `layers=`."
            )
        training, offset = arguments["training"], self.query_offset
        lengths = evaluation.Lengths(query.shape[0], rule.heads, query.shape[1], key.shape[1])
        bound = self._bound(rule, query, key, lengths)
        window = Window(after=0) if arguments.get("use_causal_mask") else None
        attention_mask = arguments["attention_mask"]
        left = _is_left_to(rule, compute)
        drops = rule.layer.dropout > 0 and training
        needs_scores = bool(arguments["return_attention_scores"] or left)
        outside, given = all_that_restricts(
            None, None, **_as_argument(attention_mask, lengths), window=window
        )
        joined = rule.spec if outside is None else rule.spec & outside
        if way_is_tiled(_tiled_argument(rule, needs_scores), needs_scores, joined, lengths, offset):
            if outside is not None:
                sizes = ops.shape(query)[1], ops.shape(key)[1]
                beside = evaluation.bind(outside, given, *sizes, offset).leaf_inputs
                bound = bound._replace(leaf_inputs=bound.leaf_inputs | beside)
            drop = {}
            if drops:
                drop = {
                    "dropout": rule.layer.dropout,
                    "seed": _keras.dropout_layer(rule.layer).seed_generator,
                }
            scale = _keras.scale(rule.layer)
            return tiled_attention(query, key, value, joined, bound, scale, offset, **drop), None
        mask = masks.and_masks(self._mask(rule, bound, lengths, query), attention_mask)
        if window is not None:
            causal = evaluation.make_mask(window, ops.shape(query)[1], ops.shape(key)[1])
            mask = masks.and_masks(mask, causal)
        if left:
            merged = {k: v for k, v in arguments.items() if k != "use_causal_mask"}
            context, scores = compute(**merged | {"attention_mask": mask})
            return masks.zero_dead_rows(context, mask), scores

        def drop(probabilities: Any) -> Any:
            return _keras.dropout_layer(rule.layer)(probabilities, training=training)

        scale = _keras.scale(rule.layer)
        return dense_attention(query, key, value, mask, scale, drop=drop if drops else None)

    def _bound(self, rule: LayerRule, query: Any, key: Any, lengths: evaluation.Lengths) -> Any:
        given = rule.given(self.tensors)
        try:
            evaluation.check_inputs(rule.spec, given, lengths, self.query_offset)
        except (TypeError, ValueError) as error:
            raise type(error)(f"In the attention layer {rule.entry}: {error}") from error
        bound = self._bounds.get(_key(rule))
        if bound is None:
            sizes = ops.shape(query)[1], ops.shape(key)[1]
            bound = evaluation.bind(rule.spec, given, *sizes, self.query_offset)
        return bound

    def _mask(
        self, rule: LayerRule, bound: evaluation.Bound, lengths: evaluation.Lengths, query: Any
    ) -> Any:
        """The mask of the rule, made once for all layers that share it where that can be."""
        scope = _scope(query)
        sizes = None if _key(rule) in self._bounds else (lengths.queries, lengths.keys)
        key = (_key(rule), rule.heads, sizes, scope)
        if scope is None or (sizes is not None and None in sizes):
            return evaluation.mask_of_all_heads(rule.spec, bound, rule.heads)
        if key not in self._masks:
            self._masks[key] = evaluation.mask_of_all_heads(rule.spec, bound, rule.heads)
        return self._masks[key]


def _is_obeyed(rule: LayerRule) -> bool:
    return rule.restricts and not looking.are_rules_off()


def _key(rule: LayerRule) -> Any:
    """Equal for layers that can share what is made of a rule."""
    return rule.spec, tuple(sorted(rule.sources.items(), key=lambda item: item[0]))


def _scope(tensor: Any) -> Any:
    """Where a tensor made now may be used again: a graph of TensorFlow's, or anywhere.

    `None` inside a trace of JAX's, which has no name for it; XLA merges equal masks there.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return "eager" if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if backend == "jax":
        import jax

        return None if isinstance(tensor, jax.core.Tracer) else "eager"
    return "eager"


def _graph() -> Any:
    """TensorFlow's graph that is being built; `None` outside of graphs and on other backends."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def check_not_in_own_function(rule: LayerRule, bound_in: Any) -> None:
    """Raise if the layer runs in a `tf.function` inside of the forward whose graph is `bound_in`.

    Or inside Keras' inference of shapes: its trace would live on, too.
    """
    graph, inside = _graph(), False
    while graph is not None and graph is not bound_in and hasattr(graph, "outer_graph"):
        if _keras.infers_shapes(graph):
            bound_in = graph
            break
        # Graphs of loops and branches are made anew for each forward.
        inside = inside or _keras.is_function_graph(graph)
        graph = graph.outer_graph
    if inside and (bound_in is None or graph is bound_in):
        raise RuntimeError(in_own_function(rule.entry))


def in_own_function(entry: Any) -> str:
    return (
        f"The attention layer {entry} is called in a `tf.function` inside the model. Such a "
        "function keeps what it traced first: attention without the rule, or under the ids of "
        "another call. Call the layer outside of it; `compile`, `predict` and `export` make one "
        "graph of the whole model."
    )


def _as_argument(attention_mask: Any, lengths: evaluation.Lengths) -> dict[str, Any]:
    """The merged mask a layer hands to `_compute_attention`, by what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": attention_mask[:, 0]}  # padding alone: whole ranges can be skipped
    return {"attention_mask": attention_mask}


def _is_left_to(rule: LayerRule, compute: Callable) -> bool:
    """Whether a class, or a rule bound before, computes attention in a way of its own."""
    classes = keras.layers.MultiHeadAttention, PerHeadMaskedMultiHeadAttention
    known = [getattr(cls, _keras.COMPUTE_ATTENTION) for cls in classes]
    return bool(
        looking.uses_flash(rule.layer)
        or getattr(compute, "__func__", None) not in known
        or _keras.has_own_softmax(rule.layer)
    )


def _tiled_argument(rule: LayerRule, needs_scores: bool) -> bool | None:
    return None if needs_scores else getattr(rule.layer, "_tiled", None)
