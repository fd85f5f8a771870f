"""Head masks in PyTorch models of Hugging Face's transformers, version 5.

Such a model asks a registry for the function that computes its attention. Here it is `_attend`,
which obeys the rule of the module that calls it.
"""

import contextlib
import copy
import functools
import inspect
import re
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask.attention.api import dot_product_attention
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.select import specs_by_layer
from keras_headmask.rules import evaluation
from keras_headmask.rules.by_head import check_heads, restricts

IMPLEMENTATION = "keras_headmask"
_NAMES = {"input_ids": "token_ids", "attention_mask": "padding_mask"}  # as rules have them
_NAMES |= {"token_type_ids": "segment_ids"}
_CROSS = "cross", "encoder_attn", "encdec", "encoder_decoder", "x_attn"  # in paths and classes
_LACKS = "softcap", "s_aux", "sinks"  # arguments that PyTorch's own attention does not know


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Any] = []  # the `_Call`s that run, the innermost last
        self.passed: dict[str, Any] = {}  # by `mask_inputs`
        self.generated: Any = (lambda: None, None, None)  # `generate`'s cache, ids and padding
        self.prepared = False  # whether they belong to the call that runs, or comes next


_thread = _OfThread()


def mask_heads(model: Any, mask_spec: Any, layers: Any = None) -> Any:
    """Put a rule on the attention of a Hugging Face model, in place.

    The model's own masks stay, in training and in `generate` with a cache. In self-attention a rule
    reads the call by name: `token_ids` is `input_ids`, `padding_mask` is `attention_mask` and
    `segment_ids` is `token_type_ids`; all else comes by `mask_inputs`. `model.config.head_masks`
    holds the rules, so that `save_pretrained` writes them; put them on again after loading.

    Args:
        model: A `transformers.PreTrainedModel`. Keras must run on PyTorch (`KERAS_BACKEND=torch`).
        mask_spec: A `MaskSpec`, its config, or a mapping from selectors of layers to specs as in
            `apply_head_masks`, such as `model.config.head_masks`.
        layers: `None` for all self-attention, a number, `"0-3"`, or a regex on paths of modules.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not a Hugging Face model.
        ValueError: if the model has rules already, attention in it does not ask the registry, a
            selector names nothing, or a rule names a head that there is not.
        RuntimeError: without Keras on PyTorch or transformers 5. From the model, if a call lacks
            what a rule reads, or another implementation of attention was set.

    >>> import keras_headmask as hm
    >>> rule = hm.PerHead({0: hm.SameSentence(102)})
    >>> model = hm.hugging_face.mask_heads(model, rule)  # doctest: +SKIP
    """
    import transformers
    from transformers.masking_utils import sdpa_mask

    if keras.backend.backend() != "torch" or int(transformers.__version__.partition(".")[0]) < 5:
        raise RuntimeError(
            "Head masks need transformers 5, and Keras on PyTorch: set KERAS_BACKEND=torch before "
            f"Keras is imported. Received: transformers {transformers.__version__}, Keras on "
            f"{keras.backend.backend()}."
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"`model` must be a Hugging Face model. Received: {type(model).__name__}.")
    if any("head_mask_spec" in vars(module) for module in model.modules()):
        raise ValueError("The model has rules already. `unmask` it, and pass them joined by `&`.")
    attention: Any = types.SimpleNamespace(known=_attention(model), unknown=[])  # as of a `Survey`
    chosen = specs_by_layer(mask_spec, layers, attention)
    specs = [(attention.known[number], spec) for number, spec in chosen.items()]
    for entry, spec in specs:
        num_key_heads = getattr(entry.layer.config, "num_key_value_heads", None)
        check_heads(spec, _num_heads(entry.layer), num_key_heads)
    copies: dict[int, Any] = {}  # another model may hold the same config, where this is written
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    attend = functools.partial(_attend, transformers.AttentionInterface()["sdpa"])
    transformers.AttentionInterface.register(IMPLEMENTATION, attend)
    transformers.AttentionMaskInterface.register(  # also where "sdpa" leaves the mask out
        IMPLEMENTATION, lambda **sizes: sdpa_mask(**sizes | {"allow_is_causal_skip": False})
    )
    models = [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)]
    before = [x.config._attn_implementation for x in models]
    model.set_attn_implementation(IMPLEMENTATION)
    for entry, _ in specs:
        _check_implementation(entry.layer)
    model.config.head_masks = {f"^{re.escape(x.path)}$": spec.get_config() for x, spec in specs}
    hooks = [model.register_state_dict_post_hook(_warn_of_state)]
    for inner, implementation in zip(models, before, strict=True):
        names = tuple(inspect.signature(inner.forward).parameters)
        enter = functools.partial(_enter, names, implementation == "eager")
        hooks.append(inner.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        hooks.append(inner.register_forward_hook(_leave, always_call=True))
    equal: dict[Any, Any] = {}  # equal rules become one, whose mask the layers share
    for entry, spec in specs:
        hides = restricts(spec, _num_heads(entry.layer))
        entry.layer.head_mask_spec = equal.setdefault(spec, spec) if hides else None
        entry.layer.head_mask_is_cross = entry.kind == "cross"
        hooks.append(entry.layer.register_forward_pre_hook(_check_implementation))
    model.head_mask_hooks = hooks, list(zip(models, before, strict=True))
    if hasattr(model, "prepare_inputs_for_generation"):  # (transformers reads the signature)
        stock = model.prepare_inputs_for_generation
        prepare = functools.update_wrapper(functools.partial(_prepare, model), stock)
        model.prepare_inputs_for_generation = prepare
    return model


def unmask(model: Any) -> Any:
    """Take the rules of `mask_heads` off, in place; attention is computed as before.

    Args:
        model: A model that `mask_heads` returned.

    Returns:
        `model`.

    Raises:
        ValueError: for a model without rules of its own.
    """
    if "head_mask_hooks" not in vars(model):
        raise ValueError(f"{type(model).__name__} has no rules by `mask_heads`.")
    hooks, before = vars(model).pop("head_mask_hooks")
    for hook in hooks:
        hook.remove()
    for inner, implementation in before:
        inner.set_attn_implementation(implementation)
    for module in model.modules():
        for name in ("head_mask_spec", "head_mask_is_cross", "prepare_inputs_for_generation"):
            vars(module).pop(name, None)
    del model.config.head_masks
    return model


@contextlib.contextmanager
def mask_inputs(**tensors: Any) -> Iterator[None]:
    """Pass what rules read and the call of the model does not hold: `(batch, length)`, by name.

    In a step with a cache, the whole sequence: `with mask_inputs(token_ids=ids_so_far): ...`. In
    cross-attention, what the rule reads of the keys, or a pair `(query_side, key_side)`.

    Args:
        tensors: The inputs of rules, by the names that the rules have for them.

    Returns:
        A context, of the calling thread.
    """
    before, _thread.passed = _thread.passed, _thread.passed | tensors
    try:
        yield
    finally:
        _thread.passed = before


# --- Which modules attend ---


def _attention(model: Any) -> list[AttentionLayer]:
    """The modules that ask for their attention by name."""
    attention = []
    for path, module in model.named_modules():
        named = "attention" in type(module).__name__.lower()
        if _asks(module) and not _looks_for_another(module):
            words = f"{path} {type(module).__name__}".lower()
            is_cross = getattr(module, "is_cross_attention", 0) or any(x in words for x in _CROSS)
            attention.append(AttentionLayer(module, path, "cross" if is_cross else "self"))
        elif _asks(module) or (named and not any(map(_asks, module.modules()))):
            raise ValueError(
                f"'{path}' ({type(module).__name__}) computes its attention, or a mask for it, "
                "itself, without transformers' `AttentionInterface`, so no rule would hold there."
            )
    return attention


def _forward(module: Any) -> Any:
    return inspect.unwrap(type(module).forward)


def _asks(module: Any) -> bool:
    code = getattr(_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _looks_for_another(module: Any) -> bool:
    """Whether it makes a mask of its own for implementations that it knows by name."""
    constants = _forward(module).__code__.co_consts
    return any("sdpa" in x if isinstance(x, tuple) else x == "sdpa" for x in constants)


def _num_heads(module: Any) -> int:
    names = "num_heads", "n_heads", "num_attention_heads"
    holders = module, module.config
    return next(getattr(x, name) for x in holders for name in names if hasattr(x, name))


# --- In a call ---


class _Call:
    """A call of a model: its arguments by name, its cache, and masks that its layers share."""

    def __init__(self, names: Any, is_eager: bool, model: Any, args: Any, kwargs: Any) -> None:
        self.arguments = dict(zip(names, args, strict=False)) | kwargs
        self.has_two = "decoder_input_ids" in names  # sequences, so that a name does not say which
        wants = self.arguments.get("output_attentions", model.config.output_attentions)
        self.is_eager = is_eager or wants
        self.masks: dict[Any, Any] = {}
        self.cached = 0  # positions in the cache before the call
        self.dropped: dict[int, int] = {}  # by layer: positions that its cache no longer holds
        self.cache = self.arguments.get("cache", self.arguments.get("past_key_values"))
        if self.cache is not None:
            self.cached = int(self.cache.get_seq_length())
            sliding = [layer for layer, slides in enumerate(self.cache.is_sliding) if slides]
            self.dropped = {x: int(self.cache.get_mask_sizes(1, x)[1]) for x in sliding}

    def tensors(self) -> dict[str, Any]:
        """Its tensors by the names of transformers and of rules; in `generate` all ids so far."""
        found = {k: x for k, x in self.arguments.items() if getattr(x, "ndim", 0) > 1}
        cache, ids, padding = _thread.generated
        if _thread.prepared and cache() is self.cache is not None:
            if (step := found.get("input_ids")) is not None:
                end = self.cached + step.shape[1]
                found["input_ids"] = ids[:, :end] if step.equal(ids[:, self.cached : end]) else step
            if padding is not None and getattr(found.get("attention_mask"), "ndim", 4) == 4:
                found["attention_mask"] = padding  # of which a static cache gets a whole mask
        return found | {_NAMES[k]: x for k, x in found.items() if k in _NAMES}


def _prepare(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """In `generate`: keep all ids, of which a step is handed the last."""
    import torch

    if (cache := kwargs.get("cache", kwargs.get("past_key_values"))) is not None:
        known, before, _ = _thread.generated
        ids = input_ids
        if known() is cache and ids.shape[1] <= before.shape[1] == int(cache.get_seq_length()):
            ids = torch.cat((before, ids), 1)  # `ids` is a chunk of a long prompt
        name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
        _thread.generated, _thread.prepared = (weakref.ref(cache), ids, kwargs.get(name)), True
    return type(model).prepare_inputs_for_generation(model, input_ids, *args, **kwargs)


def _enter(*args: Any) -> None:
    _thread.calls.append(None)  # first: `_leave` takes it off, also after an error
    _thread.calls[-1] = _Call(*args)


def _leave(*_: Any) -> None:
    _thread.calls.pop()
    _thread.prepared = _thread.prepared and bool(_thread.calls)


def _check_implementation(module: Any, *_: Any) -> None:
    if (found := module.config._attn_implementation) != IMPLEMENTATION:
        raise RuntimeError(
            f"The attention of {type(module).__name__} is {found!r}, which knows no head masks: "
            f"`model.set_attn_implementation({IMPLEMENTATION!r})`, or `unmask` the model. (It can "
            "be set where the class stands in a file that asks `ALL_ATTENTION_FUNCTIONS`.)"
        )


def _attend(
    stock: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Attention `(B, T, H, D)` and probabilities; operands are `(B, heads, length, D)`.

    `stock` is PyTorch's own. For what that lacks, and for a model that was eager, the model's own
    function computes.
    """
    import torch

    mask, hidden, queries, keys = attention_mask, None, query.shape[2], key.shape[2]
    if mask is None and kwargs.get("is_causal") and queries > 1:
        mask = query.new_ones((queries, keys), dtype=torch.bool).tril()[None, None]
    is_float = mask is not None and mask.is_floating_point()
    mask = mask if mask is None or is_float else mask.bool()
    is_eager = kwargs.get("output_attentions") or any(call.is_eager for call in _thread.calls)
    is_eager = is_eager or any(kwargs.get(name) is not None for name in _LACKS)
    if (spec := getattr(module, "head_mask_spec", None)) is not None:
        if not _thread.calls:
            raise RuntimeError(
                f"{type(module).__name__} runs outside of a call of its model, whose tensors its "
                "rule reads. Call the model, not a module in it, and switch off gradient "
                "checkpointing, which runs modules once more in the backward pass."
            )
        call = _thread.calls[-1]
        layer = None if module.head_mask_is_cross else getattr(module, "layer_idx", None)
        first = call.dropped.get(layer, 0)  # positions of a rule count from the text's start
        is_biased = is_float or kwargs.get("position_bias") is not None
        if queries > 1 and not (first or is_biased or is_eager):
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            inputs = _inputs(module, call, queries, keys)
            options = kwargs.get("scaling"), call.cached, kwargs.get("dropout", 0.0)
            return dot_product_attention(query, key, value, mask, spec, inputs, *options), None
        mask, hidden = _whole_mask(module, call, query, first, first + keys, mask)
    if is_eager:
        stock = _forward(module).__globals__["eager_attention_forward"]
        if mask is not None and mask.dtype == torch.bool:
            mask = (~mask).to(query.dtype) * torch.finfo(query.dtype).min
    kwargs["is_causal"] = False  # the mask says it
    context, probabilities = stock(module, query, key, value, mask, **kwargs)
    if hidden is not None:
        context = context.masked_fill(hidden.transpose(1, 2), 0)
        probabilities = None if probabilities is None else probabilities.masked_fill(hidden, 0)
    return context, probabilities


def _whole_mask(module: Any, call: _Call, query: Any, first: int, keys: int, mask: Any) -> Any:
    """The rule's mask of the keys from `first` on, joined with `mask`; made once for all layers.

    Rows that see nothing see all in it; they come beside it, `(B, H, T, 1)`.
    """
    import torch

    spec, (batch, heads, queries, _) = module.head_mask_spec, query.shape
    same = id(spec), module.head_mask_is_cross, id(mask), queries, first, keys
    if same not in call.masks:
        inputs = _inputs(module, call, queries, keys)
        sizes = evaluation.Lengths(batch, heads, queries, keys)
        evaluation.check_inputs(spec, inputs, sizes, call.cached)
        bound = evaluation.bind(spec, inputs, queries, keys, call.cached)
        joined = evaluation.mask_of_all_heads(spec, bound, heads)[..., first:].to(query.device)
        is_float = mask is not None and mask.is_floating_point()
        joined = joined if mask is None or is_float else joined & mask
        hidden = ~joined.any(-1, keepdim=True)
        joined, hidden = (joined | hidden, hidden) if hidden.any() else (joined, None)
        joined = torch.where(joined, mask, -torch.inf) if is_float else joined
        call.masks[same] = joined, hidden, mask  # (held: another mask may get a dead one's id)
    return call.masks[same][:2]


def _inputs(module: Any, call: _Call, queries: int, keys: int) -> dict[str, Any]:
    """What the rule of `module` reads, for `keys` from the start of their sequence."""
    import torch

    is_cross, end = module.head_mask_is_cross, call.cached + queries
    known = ({} if is_cross or call.has_two else call.tensors()) | _thread.passed
    # A static cache is longer than the text: what is empty has ids 0, and the model hides it.
    needed = end if getattr(call.cache, "is_compileable", False) else max(end, keys)
    inputs = {}
    for name, kind in module.head_mask_spec.inputs.items():
        tensor, fits = known.get(name), name in known
        if fits and not is_cross and kind.rank is not None:
            tensor = torch.as_tensor(tensor)
            if fits := tensor.ndim == 2 and tensor.shape[1] >= needed:
                tensor = torch.nn.functional.pad(tensor, (0, max(0, keys - tensor.shape[1])))
                is_cut = queries != keys and not call.cached
                tensor = (tensor[:, :queries], tensor) if is_cut else tensor
        if not fits:
            shapes = {k: tuple(getattr(x, "shape", ())) for k, x in known.items()}
            raise RuntimeError(
                f"A rule of {type(module).__name__} reads {name!r}, which the call does not hold "
                f"for {queries} queries and {needed} keys. Received: {shapes}. Pass it, `(batch, "
                "length)`, with a cache for the whole sequence: `with "
                f"hm.hugging_face.mask_inputs({name}=tensor): model(...)`."
            )
        inputs[name] = tensor
    return inputs


def _warn_of_state(model: Any, *_: Any) -> None:
    warnings.warn(
        f"The weights of {type(model).__name__} do not hold its head masks. Its own "
        "`save_pretrained` writes them with its config. After loading, call "
        "`hm.hugging_face.mask_heads(model, model.config.head_masks)`.",
        UserWarning,
        stacklevel=3,
    )
