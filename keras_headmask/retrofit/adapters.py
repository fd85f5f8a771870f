"""Attention classes that a rule reaches, what the hook must know of each, and where they stand.

A layer under a rule has one method replaced, the hook: the one that computes attention. `Attention`
describes the hook of Keras' own class. Classes of KerasHub have adapters of their own, with what
differs. An adapter is found by the module and the name of the class, so nothing of KerasHub is
imported. A rule names *query* heads.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import scopes
from keras_headmask.attention.request import Changes
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.leaves import Window

_OPERANDS = "query", "key", "value", "attention_mask"
_DEFAULTS = {"attention_mask": None, "training": None, "return_attention_scores": False}

# Classes whose attention a `Request` describes in full, beside ours.
OF_KERAS = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention


class Attention:
    """`keras.layers.MultiHeadAttention`, and subclasses that compute by `_compute_attention`."""

    hook = _keras.COMPUTE_ATTENTION  # the method that is replaced on a layer with a rule
    returns_pair = True  # context and probabilities; else the context alone
    is_self = False  # whether it can attend to its own sequence alone
    soft_cap: float | None = None
    sinks: Any = None

    def __init__(self, layer: Any):
        self.layer = layer

    @property
    def num_heads(self) -> int:
        """The heads of the query, by which a rule names them."""
        return self.layer.num_heads

    @property
    def num_key_heads(self) -> int:
        """The heads of keys and values."""
        return self.num_heads

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return _keras.scale(self.layer)

    @property
    def changes(self) -> Changes:
        """What the class does to the logits beside the mask."""
        return Changes(soft_cap=self.soft_cap, sinks=self.sinks)

    def window(self, arguments: Mapping[str, Any]) -> MaskSpec | None:
        """The class' own restriction beside `attention_mask`, as a rule on positions."""
        return Window(after=0) if arguments.get("use_causal_mask") else None

    @property
    def softmax(self) -> str | None:
        """If `call` is the hook: the attribute that holds the softmax. Else `None`."""
        return None

    @property
    def overridden(self) -> str | None:
        """The method by which a subclass of Keras' attention computes it in code of its own."""
        ours = getattr(self.layer, "_ours", None)  # (of `layers.masked.MaskedAttention`)
        classes = (*OF_KERAS, ours()) if ours is not None else OF_KERAS
        if getattr(type(self.layer), self.hook) not in [getattr(cls, self.hook) for cls in classes]:
            return self.hook
        return _keras.MASKED_SOFTMAX if _keras.has_own_softmax(self.layer) else None

    @property
    def has_own_code(self) -> bool:
        """Whether code of the class, or a flash kernel, computes, and gets the rule as a mask."""
        return scopes.uses_flash(self.layer) or self.overridden is not None

    @property
    def dropout_layer(self) -> Any:
        """The layer that drops probabilities; `None` if none does."""
        return _keras.dropout_layer(self.layer)

    def arguments(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
        attention_bias: Any = None,  # which our own classes take
    ) -> dict[str, Any]:
        """The arguments of a call of the hook, by the names of Keras' own class."""
        arguments = {k: v for k, v in locals().items() if k != "self"}
        if not use_causal_mask:
            del arguments["use_causal_mask"]  # subclasses written for an older Keras lack it
        if attention_bias is None:
            del arguments["attention_bias"]
        return arguments

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        """Context and probabilities by `compute`, the method of the class."""
        return compute(**arguments)

    def without_dead_rows(self, context: Any, mask: Any) -> Any:
        """The context, 0 for queries that see no key."""
        return masks.zero_dead_rows(context, mask)

    def sequences(self, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a call of the layer attends from and to: "query", and "value" or "key"."""
        return dict(zip(("query", "value", "key"), args, strict=False)) | dict(kwargs)

    def gives_pair(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the hook, so called, returns context and probabilities, not the context alone."""
        return self.returns_pair or arguments["return_attention_scores"]


def _name_on(layer: Any, name: str) -> str:
    """How a layer of KerasHub calls its `name`: some classes write an underscore before it."""
    return name if hasattr(layer, name) else f"_{name}"


def _held(*names: str) -> Any:
    """The attribute of the layer that has one of `names`, or that with an underscore before it."""

    def held(self: Attention) -> Any:
        names_here = (_name_on(self.layer, name) for name in names)
        return next(getattr(self.layer, x) for x in names_here if hasattr(self.layer, x))

    return property(held)


class GroupQuery(Attention):
    """`keras.layers.GroupQueryAttention`: keys come repeated to all query heads."""

    num_heads = _held("num_query_heads")
    num_key_heads = _held("num_key_value_heads")

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # The layer keeps in an attribute whether probabilities are wanted.
        kwargs = {"return_attention_scores": _keras.wants_scores(self.layer)} | kwargs
        return super().arguments(*args, **kwargs)

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        keywords = dict(arguments)
        _keras.want_scores(self.layer, keywords.pop("return_attention_scores"))
        return compute(**keywords)


class Grouped(Attention):
    """KerasHub's decoders after Llama: keys come repeated to all query heads."""

    returns_pair = False
    operands: tuple[str, ...] = _OPERANDS  # what the hook takes by position
    is_self = True
    num_heads = _held("num_query_heads", "num_attention_heads", "num_heads")
    num_key_heads = _held("effective_num_kv_heads", "num_key_value_heads", "num_heads")
    scale = _held("inv_norm_factor")
    dropout_layer = None  # the class drops parts of the context instead
    has_own_code = False

    def window(self, arguments: Mapping[str, Any]) -> MaskSpec | None:
        size = getattr(self.layer, "sliding_window_size", None)
        slides = getattr(self.layer, "use_sliding_window_attention", True)
        # (The class has a causal mask beside it.)
        return Window(before=size - 1, after=size - 1) if size and slides else None

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _DEFAULTS | dict(zip(self.operands, args, strict=False)) | kwargs

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        rest = {k: x for k, x in arguments.items() if k not in (*_OPERANDS, *_DEFAULTS)}
        if arguments["training"] is not None:
            rest["training"] = arguments["training"]
        return compute(*(arguments[name] for name in _OPERANDS), **rest), None


class GptOss(Grouped):
    """A sink for each head, and a window one key wider than that of the others."""

    operands = (*_OPERANDS, "start_index")
    sinks = _held("sinks")

    def window(self, arguments: Mapping[str, Any]) -> MaskSpec | None:
        size = self.layer.sliding_window
        return Window(before=size, after=size) if size else None


class Gemma(Grouped):
    """Gemma 1 and 2: grouped inside the hook, with a soft cap."""

    soft_cap = _held("logit_soft_cap")
    dropout_layer = _held("dropout_layer")

    @property
    def scale(self) -> float:
        layer = self.layer
        if layer.query_head_dim_normalize:
            return layer.head_dim**-0.5
        return (layer.hidden_dim // layer.num_query_heads) ** -0.5


class Gemma3(Gemma):
    def window(self, arguments: Mapping[str, Any]) -> MaskSpec | None:
        layer = self.layer
        if layer.use_sliding_window_attention and layer.use_bidirectional_attention:
            ahead = layer.sliding_window_size // 2
            return Window(before=layer.sliding_window_size - ahead - 1, after=ahead)
        return super().window(arguments)


class Gemma4(Gemma):
    """Its mask comes with the window, beyond which images see each other."""

    scale = 1.0

    def window(self, arguments: Mapping[str, Any]) -> MaskSpec | None:
        return None


class T5Gemma(Gemma):
    """Keys come repeated, and the mask as floats; the decoder's window is in it."""

    operands = (*_OPERANDS, "training")
    scale = _held("scaling")
    is_self: Any = property(lambda self: getattr(self.layer, "attention_type", "self") == "self")

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = super().arguments(*args, **kwargs)
        mask = arguments["attention_mask"]
        if mask is not None and "float" in keras.backend.standardize_dtype(mask.dtype):
            mask = masks.from_additive(mask)[:, 0]  # (one for all heads)
        return arguments | {"attention_mask": mask}

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        *operands, mask = (arguments[name] for name in _OPERANDS)
        if mask is not None:
            mask = masks.to_additive(masks.lift(mask), self.layer.compute_dtype)
        return compute(*operands, mask, arguments["training"]), None

    def sequences(self, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        inputs = _keras.arguments_of(self.layer, args, kwargs)["inputs"]
        return dict(zip(("query", "value"), inputs, strict=True))


class GPTNeoX(Grouped):
    """As many key heads as query heads."""

    dropout_layer = _held("attn_dropout_layer")


class OwnSoftmax(Grouped):
    """Decoders with ALiBi: `call` computes all of attention, by a softmax that takes a mask."""

    hook = "call"

    @property
    def softmax(self) -> str:
        return _name_on(self.layer, "softmax")

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        flags = {k: kwargs.pop(k) for k in _DEFAULTS if k in kwargs and k != "attention_mask"}
        return _DEFAULTS | _keras.arguments_of(self.layer, args, kwargs) | flags

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        names = _keras.argument_names(self.layer)
        return compute(**{k: x for k, x in arguments.items() if k in names}), None


class T5(Attention):
    """Its mask lies in a bias by distance, which the first layer of a stack hands to the others.

    The code of its class runs under another bias; its dropout layer gets the probabilities.
    """

    hook = "call"
    returns_pair = False
    has_own_code = True

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if "own_mask" in kwargs:  # they are that already
            return kwargs
        arguments = _DEFAULTS | _keras.arguments_of(self.layer, args, kwargs)
        query, key, cache = (arguments[x] for x in ("hidden_states", "key_value_states", "cache"))
        key = query if key is None else key
        if cache is not None:  # as long as it is, and of one size with the query
            key = ops.zeros_like(query[:, :1]) + cache[:, 0, :, 0, :1]
        bias = arguments["position_bias"]
        if bias is None:
            bias = self._bias(arguments, ops.shape(query)[1], ops.shape(key)[1])
        mask = bias > masks.HIDDEN / 2
        key = key[:, :, None]
        operands = {"query": query[:, :, None], "key": key, "value": key, "position_bias": bias}
        return arguments | operands | {"attention_mask": mask, "own_mask": mask}

    def _bias(self, arguments: Mapping[str, Any], queries: Any, keys: Any) -> Any:
        """The bias that the class makes, its mask in it, `(B or 1, H, T, S)`."""
        layer, mask, start = self.layer, arguments["mask"], arguments["cache_update_index"]
        if layer.use_relative_attention_bias:
            bias = layer.compute_bias(queries, keys, 0 if start is None else start)
        else:
            bias = ops.zeros((1, layer.num_heads, queries, keys), layer.compute_dtype)
        return bias if mask is None else ops.where(masks.lift(mask), bias, bias + masks.HIDDEN)

    def called(self, compute: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
        mask, bias = arguments["attention_mask"], arguments["position_bias"]
        usual, probabilities = self.layer.dropout_layer, []

        def drop(weights: Any, **kwargs: Any) -> Any:
            if mask is not arguments["own_mask"]:  # for fully masked rows
                weights = ops.where(mask, weights, ops.zeros_like(weights))
            probabilities.append(weights)
            return usual(weights, **kwargs)

        changed = {"hidden_states": arguments["query"][:, :, 0]}
        if mask is not arguments["own_mask"]:
            hidden = ops.cast(masks.HIDDEN, bias.dtype)
            changed["position_bias"] = ops.where(masks.lift(mask), bias, hidden)
        names = _keras.argument_names(self.layer)
        taken = {k: x for k, x in (arguments | changed).items() if k in names}
        seen = scopes.standing_in(self.layer, {"dropout_layer": drop})
        output, _, cache = compute.__func__(seen, **taken)
        return (output, bias, cache), probabilities[0]

    def without_dead_rows(self, context: Any, mask: Any) -> Any:
        return context  # they have no probabilities

    def sequences(self, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = _keras.arguments_of(self.layer, args, kwargs)
        return {"query": arguments["hidden_states"], "value": arguments["key_value_states"]}


class Deberta(Grouped):
    """Its class adds a bias of keys and distances to the logits, so its own code computes."""

    returns_pair = True
    has_own_code = True
    scale = _held("scale_factor")

    def called(self, compute: Callable, arguments: dict[str, Any]) -> tuple[Any, Any]:
        return compute(**{k: x for k, x in arguments.items() if k != "return_attention_scores"})


# --- Which class has which ------------------------------------------------------------------------

_MODELS = "keras_hub.src.models."
_ADAPTERS: dict[str, type[Attention]] = {
    f"{_MODELS}llama.llama_attention.LlamaAttention": Grouped,
    f"{_MODELS}mistral.mistral_attention.CachedMistralAttention": Grouped,
    f"{_MODELS}mixtral.mixtral_attention.CachedMixtralAttention": Grouped,
    f"{_MODELS}phi3.phi3_attention.Phi3Attention": Grouped,
    f"{_MODELS}smollm3.smollm3_layers.SmolLM3Attention": Grouped,
    f"{_MODELS}qwen.qwen_attention.QwenAttention": Grouped,
    f"{_MODELS}qwen3.qwen3_attention.Qwen3Attention": Grouped,
    f"{_MODELS}qwen3_5.qwen3_5_attention.Qwen3_5Attention": Grouped,
    f"{_MODELS}qwen_moe.qwen_moe_attention.QwenMoeAttention": Grouped,
    f"{_MODELS}qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention": Grouped,
    f"{_MODELS}gemma.gemma_attention.CachedGemmaAttention": Gemma,
    f"{_MODELS}gemma3.gemma3_attention.CachedGemma3Attention": Gemma3,
    f"{_MODELS}gemma4.gemma4_attention.Gemma4TextAttention": Gemma4,
    f"{_MODELS}gpt_oss.gpt_oss_attention.GptOssAttention": GptOss,
    f"{_MODELS}t5gemma.t5gemma_attention.T5GemmaAttention": T5Gemma,
    f"{_MODELS}t5gemma2.t5gemma2_attention.T5Gemma2Attention": T5Gemma,
    f"{_MODELS}t5.t5_multi_head_attention.T5MultiHeadAttention": T5,
    f"{_MODELS}falcon.falcon_attention.FalconAttention": OwnSoftmax,
    f"{_MODELS}bloom.bloom_attention.BloomAttention": OwnSoftmax,
    f"{_MODELS}deberta_v3.disentangled_self_attention.DisentangledSelfAttention": Deberta,
    f"{_MODELS}gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": GPTNeoX,
}


def adapter_of(layer: Any) -> Attention | None:
    """The adapter of an attention layer; `None` if a rule cannot reach its class."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        home = next(cls for cls in type(layer).__mro__ if "call" in vars(cls))
        is_other = home.__module__.startswith(_MODELS)  # of a KerasHub model, with its own `call`
        return None if is_other else Attention(layer)
    if isinstance(layer, keras.layers.GroupQueryAttention):
        return GroupQuery(layer)
    for cls in type(layer).__mro__:
        if adapter := _ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}"):
            return adapter(layer)
        if any(name in vars(cls) for name in _keras.KERAS_HUB_HOOKS):
            return None  # a subclass that computes differently
    return None


def adapted(layer: Any) -> Attention:
    """The adapter of a layer that has one."""
    adapter = adapter_of(layer)
    assert adapter is not None, layer
    return adapter


# --- Where attention stands in a model -----------------------------------------------------------


def walk(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and layers inside `layer`, in forward order as far as the graph shows it."""
    if adapter_of(layer) is not None:
        return  # (no attention is inside attention)
    inner = list(layer.layers) if isinstance(layer, keras.Model) else []
    seen = {id(x) for x in inner}
    inner += [x for x in _keras.sublayers(layer) if id(x) not in seen]
    # Operations without a layer: `keras.ops.dot_product_attention` in a graph, say.
    if isinstance(layer, _keras.Functional):
        inner += [x for x in layer.operations if not isinstance(x, keras.Layer)]
    for child in inner:
        place = f"{path}/{child.name}" if path else child.name
        yield place, child
        yield from walk(child, place)


def attention(layer: Any) -> list[keras.Layer]:
    """The attention layers that `layer` is or holds, each once, in the order of `walk`."""
    layers = (layer, *(inner for _, inner in walk(layer)))
    return list(dict.fromkeys(x for x in layers if adapter_of(x) is not None))


def holds(outer: Any, inner: Any) -> bool:
    """Whether `inner` is `outer`, or a layer inside it."""
    return any(x is inner for x in _keras.layers_of(outer))


@contextlib.contextmanager
def without_remat(root: keras.Layer) -> Iterator[None]:
    """Run layers of a RematScope without it: remat copies or traces tensors."""
    name, as_it_is = "rematerialized_call", lambda _, call, *args, **kwargs: call
    with contextlib.ExitStack() as stack:
        for layer in _keras.layers_of(root):
            if _keras.remat_mode(layer) is not None:
                stack.enter_context(scopes.overriding(layer, name, as_it_is))
        yield


@contextlib.contextmanager
def errors_naming(layer: Any) -> Iterator[None]:
    """Let an error of what runs inside say in which attention layer it is."""
    name = layer if isinstance(layer, AttentionLayer) else f"'{layer.name}'"
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"In the attention layer {name}: {error}") from error


class AttentionLayer(NamedTuple):
    """An attention layer and the names of the layers around it, outermost first.

    `kind` is "self", "cross", or "unclear". `runs_on_two`: it is called more than once, and not on
    one sequence after the other. `ran`: a call of it was seen, in a graph or when Keras inferred
    shapes.
    """

    layer: keras.Layer
    path: str
    kind: str
    runs_on_two: bool = False
    ran: bool = True

    @property
    def num_heads(self) -> Any:
        """The number of query heads; `None` if the layer has no `num_heads`."""
        adapter = adapter_of(self.layer)
        return getattr(self.layer, "num_heads", None) if adapter is None else adapter.num_heads

    @property
    def why_unclear(self) -> str:
        """Of a layer whose kind is "unclear", for an error."""
        why = "" if self.ran else " It did not run when Keras inferred shapes."
        return (
            f"Cannot tell whether the attention layer {self} attends to its own sequence or to "
            f"another.{why}"
        )

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.layer).__name__})"


# --- The position of the first query --------------------------------------------------------------

# Where KerasHub's layers take the position of the first query, the outermost layer first.
_CACHES = "self_attention_cache", "attention_cache", "cache"
_OFFSETS = tuple(f"{name}_update_index" for name in _CACHES)
_OFFSET = "query_offset"  # of our own layers


def offset_of_call(layer: Any, args: Any, kwargs: Any, outer: Any) -> Any:
    """The position of the first query, where the layer's own arguments name it, or a cache.

    `outer` is the one that a layer around it was called with.
    """
    arguments = _keras.arguments_of(layer, args, kwargs)
    names = *_OFFSETS, _OFFSET
    offset = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    for cache, name in zip(_CACHES, _OFFSETS, strict=True):
        cached = arguments.get(cache) is not None and name in _keras.argument_names(layer)
        if cached and offset is None and outer is None:
            raise ValueError(
                f"The rule of the layer '{layer.name}' needs the place of the first token: pass "
                f"`{name}`."
            )
    return offset
