"""Head masks in PyTorch models of Hugging Face's transformers, version 5.

Such a model asks a registry for the function that computes its attention. A module with a rule
finds `_attend`, which joins the rule's mask with the model's, for the function that stood there.
"""

import contextvars
import copy
import functools
import inspect
import re
import types
import warnings
from typing import Any

import keras

from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.find import specs_by_layer
from keras_headmask.rules.base import check_heads, restricts
from keras_headmask.rules.evaluation import Lengths, bind, check_inputs, mask_of_all_heads

IMPLEMENTATION = "keras_headmask"
_NAMES = {"input_ids": "token_ids", "attention_mask": "padding_mask"}  # as rules have them
_NAMES |= {"token_type_ids": "segment_ids"}
_CROSS = "cross", "encoder_attn", "encdec", "encoder_decoder", "x_attn"  # in paths and classes

_calls = contextvars.ContextVar[tuple[Any, ...]]("calls", default=())  # the innermost last


def mask_heads(model: Any, mask_spec: Any, layers: Any = None) -> Any:
    """A Hugging Face model with a rule on its attention, put there in place.

    The model's own masks stay, in training and in `generate` with a cache. In self-attention a rule
    reads the call: `token_ids` is `input_ids`, `padding_mask` is `attention_mask`, `segment_ids` is
    `token_type_ids`. All else the call takes by the rule's name, `(batch, length)`: in a step with
    a cache, of the whole sequence; in cross-attention, of the keys or a pair `(query_side,
    key_side)`. `save_pretrained` writes the rules; put them on again after loading.

    Args:
        model: A `transformers.PreTrainedModel`. Keras must run on PyTorch (`KERAS_BACKEND=torch`).
        mask_spec: A `MaskSpec`, its config, or a mapping from selectors of layers to specs, such as
            `model.config.head_masks`.
        layers: `None` for all self-attention, a number, `"0-3"`, or a regex on paths of modules.

    Raises:
        TypeError: if `model` is not a Hugging Face model.
        ValueError: if the model has rules already, attention in it does not ask the registry, a
            selector names nothing, or a rule names a head that there is not.
        RuntimeError: without Keras on PyTorch or transformers 5. From the model: if a call lacks
            what a rule reads or has a static cache, or its attention is not "sdpa" or "eager".

    >>> import keras_headmask as hm
    >>> rule = hm.PerHead({0: hm.SameSentence(102)})
    >>> model = hm.hugging_face.mask_heads(model, rule)  # doctest: +SKIP
    """
    import transformers

    if keras.backend.backend() != "torch" or int(transformers.__version__.partition(".")[0]) < 5:
        raise RuntimeError(
            "Head masks need transformers 5, and Keras on PyTorch: set KERAS_BACKEND=torch before "
            f"Keras is imported. Received: transformers {transformers.__version__}, Keras on "
            f"{keras.backend.backend()}."
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"`model` must be a Hugging Face model. Received: {type(model).__name__}.")
    if any({"head_mask", "head_mask_hooks"} & vars(x).keys() for x in model.modules()):
        raise ValueError("The model has rules already. `unmask` it, and pass them joined by `&`.")
    found: Any = types.SimpleNamespace(known=_attention(model), unknown=[])  # as a `Found` has it
    specs = [(found.known[n], x) for n, x in specs_by_layer(mask_spec, layers, found).items()]
    for entry, spec in specs:
        check_heads(spec, *_num_heads(entry.layer))
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)
    copies: dict[int, Any] = {}  # another model may hold the same config, where this is written
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    model.config.head_masks = {f"^{re.escape(x.path)}$": spec.get_config() for x, spec in specs}
    for entry, spec in specs:
        if restricts(spec, _num_heads(entry.layer)[0]):
            entry.layer.head_mask = spec, entry.kind == "cross", entry.layer.config
            entry.layer.config = copy.copy(entry.layer.config)
            entry.layer.config._attn_implementation = {"": IMPLEMENTATION}  # not in configs inside
    model.head_mask_hooks = [model.register_state_dict_post_hook(_warn_of_state)]
    reads = {name for _, spec in specs for name in spec.inputs}
    for inner in model.modules():
        if isinstance(inner, transformers.PreTrainedModel):
            names = tuple(inspect.signature(inner.forward).parameters)
            enter = functools.partial(_enter, names, reads - {*names})
            model.head_mask_hooks += [
                inner.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                inner.register_forward_hook(_leave, always_call=True),
            ]
    if stock := getattr(model, "prepare_inputs_for_generation", None):
        prepare = functools.update_wrapper(functools.partial(_prepare, model), stock)
        known = inspect.signature(stock).parameters  # by which `generate` says what it takes
        more = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in reads - {*known}]
        more = sorted([*known.values(), *more], key=lambda x: x.kind)
        vars(prepare)["__signature__"] = inspect.Signature(more)
        model.prepare_inputs_for_generation = prepare
    return model


def unmask(model: Any) -> Any:
    """A model without the rules of `mask_heads`, taken off in place: it attends as before.

    Args:
        model: A model that `mask_heads` returned.

    Raises:
        ValueError: for a model without rules of its own.
    """
    if "head_mask_hooks" not in vars(model):
        raise ValueError(f"{type(model).__name__} has no rules by `mask_heads`.")
    for hook in vars(model).pop("head_mask_hooks"):
        hook.remove()
    for module in model.modules():
        if rule := vars(module).pop("head_mask", None):
            module.config = rule[2]
    vars(model).pop("prepare_inputs_for_generation", None)
    del model.config.head_masks
    return model


def _attention(model: Any) -> list[AttentionLayer]:
    """The modules that ask for their attention by name."""
    attention = []
    for path, module in model.named_modules():
        cls, code = type(module).__name__, _asking_code(module)
        constants = () if code is None else code.co_consts
        # Or makes a mask of its own for implementations that it knows by name.
        knows = any("sdpa" in x if isinstance(x, tuple) else x == "sdpa" for x in constants)
        unasked = code is None and "attention" in cls.lower()
        if knows or (unasked and not any(map(_asking_code, module.modules()))):
            raise ValueError(
                f"'{path}' ({cls}) computes its attention, or a mask for it, itself, without "
                "transformers' `AttentionInterface`, so no rule would hold there."
            )
        if code is not None:
            is_cross = getattr(module, "is_cross_attention", False)
            is_cross = is_cross or any(x in f"{path} {cls}".lower() for x in _CROSS)
            attention.append(AttentionLayer(module, path, "cross" if is_cross else "self"))
    return attention


def _forward(module: Any) -> Any:
    return inspect.unwrap(type(module).forward)


def _asking_code(module: Any) -> Any:
    """The code of a module that asks the registry; `None` of another."""
    code = getattr(_forward(module), "__code__", None)
    return code if "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ()) else None


def _num_heads(module: Any) -> tuple[int, int | None]:
    names, holders = ("num_heads", "n_heads", "num_attention_heads"), (module, module.config)
    heads = next(getattr(x, name) for x in holders for name in names if hasattr(x, name))
    return heads, getattr(module.config, "num_key_value_heads", None)


def _prepare(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """In `generate`: the inputs of a step, its ids with all ids so far."""
    inputs = type(model).prepare_inputs_for_generation(model, input_ids, *args, **kwargs)
    step = inputs.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    if step is not None and step is not input_ids:
        step.head_mask_ids = input_ids
    return inputs


def _enter(names: Any, reads: Any, model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Note a call of a model: what rules may read of it, and how much its cache holds."""
    calls, passed = _calls.get(), {k: kwargs[k] for k in reads & kwargs.keys()}
    call = types.SimpleNamespace(masks={}, passed=calls[-1].passed | passed if calls else passed)
    _calls.set((*calls, call))  # first: `_leave` takes it off, also after an error
    kwargs = {k: x for k, x in kwargs.items() if k not in passed}
    arguments = dict(zip(names, args, strict=False)) | kwargs
    cache = arguments.get("cache", arguments.get("past_key_values"))
    call.cached = 0 if cache is None else int(cache.get_seq_length())
    found = {k: x for k, x in arguments.items() if getattr(x, "ndim", 0) > 1}
    if "decoder_input_ids" in names:
        found = {}  # of two sequences, so that a name does not say which
    found = {k: getattr(x, "head_mask_ids", x) for k, x in found.items()}
    call.known = found | {_NAMES[k]: x for k, x in found.items() if k in _NAMES} | call.passed
    return args, kwargs


def _leave(*_: Any) -> None:
    _calls.set(_calls.get()[:-1])


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Attention `(B, T, H, D)` and probabilities; operands are `(B, heads, length, D)`."""
    from transformers import AttentionInterface

    calls, name, (spec, is_cross, config) = _calls.get(), type(module).__name__, module.head_mask
    if not calls:
        raise RuntimeError(
            f"{name} runs outside of a call of its model, whose tensors its rule reads. Call the "
            "model, not a module in it, and switch off gradient checkpointing, which runs modules "
            "once more in the backward pass."
        )
    if (implementation := config._attn_implementation) not in ("sdpa", "eager"):
        raise RuntimeError(
            f"The attention of {name} is {implementation!r}, under which no rule holds: "
            "`model.set_attn_implementation('sdpa')`, or `unmask` the model."
        )
    function = AttentionInterface()["sdpa"]
    if implementation == "eager":
        function = _forward(module).__globals__["eager_attention_forward"]
    elif mask is None:
        is_causal = kwargs.get("is_causal")
        mask = getattr(module, "is_causal", True) if is_causal is None else is_causal
    call, same = calls[-1], (spec, is_cross, id(mask), query.shape[2], key.shape[2])
    if same not in call.masks:  # (`mask` is held: another may get the id of one that is gone)
        call.masks[same] = *_joined(module, call, query, key.shape[2], mask), mask
    joined, dead, _ = call.masks[same]
    kwargs["is_causal"] = False  # `joined` says it
    context, probabilities = function(module, query, key, value, joined, **kwargs)
    if dead is not None:
        context = context.masked_fill(dead.transpose(1, 2), 0)
        probabilities = None if probabilities is None else probabilities.masked_fill(dead, 0)
    return context, probabilities


def _joined(module: Any, call: Any, query: Any, keys: int, mask: Any) -> tuple[Any, Any]:
    """The mask of the rule and `mask`, floats to be added, and rows that see nothing: all, in it.

    `mask`: booleans, floats to be added, `True` for a causal one, or none.
    """
    import torch

    name, (spec, is_cross, _) = type(module).__name__, module.head_mask
    batch, heads, queries, _ = query.shape
    end = keys if is_cross else call.cached + queries
    if keys != end and not (call.cached and queries <= keys < end):  # of sliding caches, the last
        raise RuntimeError(
            f"{name} attends from {queries} queries, after {call.cached} in the cache, to {keys} "
            "keys, whose positions are not known. In place of a static cache take one that grows, "
            "`cache=transformers.DynamicCache()`."
        )
    known = call.passed if is_cross else call.known
    for read, kind in spec.inputs.items():
        shape = tuple(getattr(known.get(read), "shape", ()))
        if read not in known or not (is_cross or kind.rank is None or shape[1:] == (end,)):
            shapes = {k: getattr(x, "shape", None) for k, x in known.items()}
            raise RuntimeError(
                f"A rule of {name} reads {read!r}, which the call does not hold for {queries} "
                f"queries and {end} keys. Received: {shapes}. Pass it, `(batch, length)`, with a "
                f"cache for the whole sequence: `model(..., {read}=tensor)`. (`generate` knows all "
                "ids, but not with `prefill_chunk_size`.)"
            )
    inputs, lengths = {x: known[x] for x in spec.inputs}, Lengths(batch, heads, queries, end)
    check_inputs(spec, inputs, lengths, call.cached)
    bound = bind(spec, inputs, queries, end, call.cached)
    allowed = mask_of_all_heads(spec, bound, heads)[..., end - keys :].to(query.device)
    added = query.new_zeros(())
    if isinstance(mask, torch.Tensor):
        if mask.is_floating_point():
            added, mask = mask.to(query.dtype), mask > torch.finfo(mask.dtype).min
        allowed = allowed & mask.bool()
    elif mask and queries > 1:
        allowed = allowed.tril()
    dead = ~allowed.any(-1, keepdim=True)
    return torch.where(allowed | dead, added, -torch.inf), dead if dead.any() else None


def _warn_of_state(model: Any, *_: Any) -> None:
    warnings.warn(
        f"The weights of {type(model).__name__} do not hold its head masks; its `save_pretrained` "
        "writes them with its config. After loading: `mask_heads(model, model.config.head_masks)`.",
        stacklevel=3,
    )
