"""Head masks in PyTorch models of Hugging Face's transformers, version 5.

Such a model asks a registry for the function that computes its attention. Here the function is
`hm.dot_product_attention`, under the rule of the module that calls it.
"""

import contextlib
import copy
import functools
import inspect
import json
import pathlib
import re
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_headmask.attention.api import dot_product_attention
from keras_headmask.masks import and_masks
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.select import specs_by_layer
from keras_headmask.rules.by_head import check_heads
from keras_headmask.rules.evaluation import make_mask

IMPLEMENTATION, FILE = "keras_headmask", "head_masks.json"
_NAMES = {"input_ids": "token_ids", "attention_mask": "padding_mask"}  # as rules have them
_NAMES |= {"token_type_ids": "segment_ids", "decoder_input_ids": "token_ids"}
_NOT_TAKEN = "sinks", "block_indices", "head_mask"  # tensors that change what is attended to


class _Call(NamedTuple):
    """A call of a model: its tensors by name, and its cache before the call."""

    inputs: dict[str, Any]
    cached: int  # positions
    dropped: dict[int, int]  # by layer: positions that its cache no longer holds, at the start


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []  # those that run, the innermost last
        self.passed: dict[str, Any] = {}  # by `mask_inputs`
        self.generated: Any = None  # all ids so far, in `generate`
        self.saves = False  # whether the rules are written, too


_thread = _OfThread()


def mask_heads(model: Any, mask_spec: Any, layers: Any = None) -> Any:
    """Put a rule on the attention of a Hugging Face model, in place.

    The model's own masks stay, in training and in `generate` with a cache. A rule reads the inputs
    of the call by name: `token_ids` is `input_ids`, `padding_mask` is `attention_mask` and
    `segment_ids` is `token_type_ids`; others come by `mask_inputs`. `save_pretrained` writes the
    rules beside the weights.

    Args:
        model: A `transformers.PreTrainedModel`. Keras must run on PyTorch (`KERAS_BACKEND=torch`).
        mask_spec: A `MaskSpec`, its config (a dict, or JSON text), a mapping from selectors of
            layers to specs as in `apply_head_masks`, or the path of a `head_masks.json`.
        layers: `None` for all self-attention, a number, `"0-3"`, or a regex on paths of modules.

    Returns:
        `model`.

    Raises:
        TypeError: if `model` is not a Hugging Face model.
        ValueError: if the model has rules already, attention in it does not ask the registry, a
            selector names nothing, or a rule names a head that there is not.
        RuntimeError: if Keras does not run on PyTorch, or transformers is older than 5. From the
            model: if another implementation of attention was set, or a call lacks what a rule
            reads.

    >>> import keras_headmask as hm
    >>> rule = hm.PerHead({0: hm.SameSentence(102)})
    >>> model = hm.hugging_face.mask_heads(model, rule)  # doctest: +SKIP
    """
    import transformers

    if keras.backend.backend() != "torch":
        raise RuntimeError(
            "Hugging Face models are PyTorch, and Keras runs on "
            f"{keras.backend.backend()}: set KERAS_BACKEND=torch before Keras is imported."
        )
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise RuntimeError(
            "Head masks need transformers 5, whose models take their attention by name. Received: "
            f"transformers {transformers.__version__}. Run `pip install -U transformers`."
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"`model` must be a Hugging Face model. Received: {type(model).__name__}.")
    if any(map(_is_masked, model.modules())):
        raise ValueError("The model has rules already. `unmask` it, and pass them joined by `&`.")
    if isinstance(mask_spec, str) and mask_spec.lstrip().startswith("{"):
        mask_spec = json.loads(mask_spec)
    if isinstance(mask_spec, (str, pathlib.Path)):
        rules = json.loads(pathlib.Path(mask_spec).read_text())
        mask_spec = {f"^{re.escape(path)}$": rule for path, rule in rules.items()}
    attention: Any = types.SimpleNamespace(known=_attention(model), unknown=[])  # as of a `Survey`
    specs = {attention.known[i]: s for i, s in specs_by_layer(mask_spec, layers, attention).items()}
    for entry, spec in specs.items():
        num_key_heads = getattr(entry.layer.config, "num_key_value_heads", None)
        check_heads(spec, _num_heads(entry.layer), num_key_heads)
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, _boolean_mask)
    copies: dict[int, Any] = {}  # another model may hold the same config, where this is written
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    models = [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)]
    before = [x.config._attn_implementation for x in models]
    model.set_attn_implementation(IMPLEMENTATION)
    for entry in specs:
        if entry.layer.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"transformers does not let the attention of {entry} be set: its class "
                "must stand in a file that asks `ALL_ATTENTION_FUNCTIONS.get_interface`."
            )
    for entry, spec in specs.items():
        entry.layer.head_mask_spec = spec
    model.head_masks = {entry.path: spec for entry, spec in specs.items()}
    hooks = [x.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True) for x in models]
    hooks += [x.register_forward_hook(_leave, always_call=True) for x in models]
    hooks.append(model.register_state_dict_post_hook(_warn_of_state))
    model.head_mask_hooks = hooks, list(zip(models, before, strict=True))
    for name, method in _REPLACED.items():
        if hasattr(model, name):  # (transformers reads the signature)
            stock, replaced = getattr(model, name), functools.partial(method, model)
            setattr(model, name, functools.update_wrapper(replaced, stock))
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
    hooks, before = model.head_mask_hooks
    for hook in hooks:
        hook.remove()
    for inner, implementation in before:
        inner.set_attn_implementation(implementation)
    for module in filter(_is_masked, model.modules()):
        del module.head_mask_spec
    for name in ("head_masks", "head_mask_hooks", *_REPLACED):
        vars(model).pop(name, None)
    return model


@contextlib.contextmanager
def mask_inputs(**tensors: Any) -> Iterator[None]:
    """Pass what rules read and the call of the model does not hold: `(batch, length)`, by name.

    In a step with a cache, the whole sequence: `with mask_inputs(token_ids=ids_so_far): ...`

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


def _is_masked(module: Any) -> bool:
    return hasattr(module, "head_mask_spec")


def _attention(model: Any) -> list[AttentionLayer]:
    """The modules that ask for their attention by name."""
    attention = []
    for path, module in model.named_modules():
        named = "attention" in type(module).__name__.lower()
        if _asks(module) and not _looks_for_another(module):
            words = f"{path} {type(module).__name__}".lower()
            is_cross = getattr(module, "is_cross_attention", False)
            is_cross = is_cross or any(x in words for x in ("cross", "encoder_attn", "encdec"))
            attention.append(AttentionLayer(module, path, "cross" if is_cross else "self"))
        elif _asks(module) or (named and not any(map(_asks, module.modules()))):
            raise ValueError(
                f"'{path}' ({type(module).__name__}) computes its attention, or a mask for it, "
                "itself, without transformers' `AttentionInterface`, so no rule would hold there."
            )
    return attention


def _asks(module: Any) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _looks_for_another(module: Any) -> bool:
    """Whether it makes a mask of its own for implementations that it knows by name."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    return any("sdpa" in x if isinstance(x, tuple) else x == "sdpa" for x in constants)


def _num_heads(module: Any) -> int:
    names = "num_heads", "n_heads", "num_attention_heads"
    known = [getattr(module, name) for name in names if hasattr(module, name)]
    return known[0] if known else module.config.num_attention_heads


# --- In a call ---


def _prepare(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """In `generate`: keep all ids, of which a step is handed the last."""
    _thread.generated = input_ids
    return type(model).prepare_inputs_for_generation(model, input_ids, *args, **kwargs)


def _enter(model: Any, args: Any, kwargs: Any) -> None:
    _thread.calls.append(_Call({}, 0, {}))  # first: `_leave` takes it off, also after an error
    _thread.calls[-1] = _read_call(model, args, kwargs)


def _read_call(model: Any, args: Any, kwargs: Any) -> _Call:
    masked = [x for x in model.modules() if _is_masked(x)]
    for module in masked:
        if module.config._attn_implementation != IMPLEMENTATION:
            raise RuntimeError(
                f"{type(model).__name__} has head masks, and its attention was set to "
                f"{module.config._attn_implementation!r}, which does not know them. Set it back, "
                f"`model.set_attn_implementation({IMPLEMENTATION!r})`, or `unmask` the model."
            )
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    cache = arguments.get("cache", arguments.get("past_key_values"))
    inputs = {k: v for k, v in arguments.items() if getattr(v, "ndim", 0) > 1}
    cached, dropped = 0, {}
    if cache is not None:
        cached = int(cache.get_seq_length())
        layers = [x.layer_idx for x in masked if getattr(x, "layer_idx", None) is not None]
        dropped = {layer: int(cache.get_mask_sizes(1, layer)[1]) for layer in layers}
    for name in ("input_ids", "decoder_input_ids"):
        if cached and name in inputs and (ids := _thread.generated) is not None:
            step = ids[:, cached : cached + inputs[name].shape[1]]
            is_all = step.shape == inputs[name].shape and bool((step == inputs[name]).all())
            inputs[name] = ids if is_all else inputs[name]
    named = {_NAMES[name]: x for name, x in inputs.items() if name in _NAMES}
    return _Call(named | inputs, cached, dropped)


def _leave(*_: Any) -> None:
    _thread.calls.pop()
    if not _thread.calls:
        _thread.generated = None


def _boolean_mask(**sizes: Any) -> Any:
    """The model's own mask, True = may attend; also where other functions would leave it out."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**sizes | {"allow_is_causal_skip": False})


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Attention `(B, T, H, D)` and probabilities; operands are `(B, heads, length, D)`."""
    spec, inputs, offset = getattr(module, "head_mask_spec", None), None, None
    mask, bias = attention_mask, None
    if mask is not None and mask.is_floating_point():
        mask, bias = None, attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if unknown := [name for name in _NOT_TAKEN if kwargs.get(name) is not None]:
        raise RuntimeError(
            f"{type(module).__name__} passes {unknown[0]!r} to its attention, which head masks do "
            "not take: `unmask` the model."
        )
    queries, keys = query.shape[2], key.shape[2]
    if spec is not None:
        if not _thread.calls:
            raise RuntimeError(
                f"{type(module).__name__} runs outside of a call of its model, so what its rule "
                "reads is not known. Call the model, not a module in it, and switch off gradient "
                "checkpointing, which runs modules once more in the backward pass."
            )
        call = _thread.calls[-1]
        offset, first = call.cached, call.dropped.get(getattr(module, "layer_idx", -1), 0)
        inputs = {x: _input(module, x, queries, first + keys, offset) for x in spec.inputs}
        if first:  # the cache of a sliding window: positions of a rule count from the text's start
            seen = make_mask(spec, queries, first + keys, query.shape[1], inputs, offset)
            mask, spec, inputs, offset = and_masks(mask, seen[..., first:]), None, None, None
    wants = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    context = dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        mask_spec=spec,
        mask_inputs=inputs,
        scale=scaling,
        query_offset=offset,
        dropout=dropout,
        return_scores=bool(wants),
        bias=bias,
        logits_soft_cap=softcap,
        sinks=s_aux,
    )
    return context if wants else (context, None)


def _input(module: Any, name: str, queries: int, keys: int, offset: int) -> Any:
    """What a rule reads of the sequence of `keys`, in which the queries stand at `offset`."""
    import torch

    # The last source that holds a name counts: the innermost call, and above all `mask_inputs`.
    sources = *(call.inputs for call in _thread.calls), _thread.passed
    tensors = [(k, torch.as_tensor(x)) for source in sources for k, x in source.items()]
    by_position = {k: x for k, x in tensors if x.ndim == 2}
    if name not in by_position:
        shapes = {k: tuple(x.shape) for k, x in tensors}
        raise RuntimeError(
            f"A rule of {type(module).__name__} reads {name!r}, `(batch, length)`, which the call "
            f"does not hold. Received: {shapes}. Pass it: `with "
            f"hm.hugging_face.mask_inputs({name}=tensor): model(...)`."
        )
    tensor = by_position[name]
    if tensor.shape[1] < offset + queries:
        raise RuntimeError(
            f"{name!r} has {tensor.shape[1]} positions of {offset + queries}: with a cache a rule "
            f"needs the whole sequence: `with hm.hugging_face.mask_inputs({name}=tensor): ...`."
        )
    tensor = torch.nn.functional.pad(tensor, (0, max(0, keys - tensor.shape[1])))
    # A static cache is longer than the text: what is empty has ids 0, and the model hides it.
    return tensor if offset or queries == keys else (tensor[:, :queries], tensor)


def _save(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    _thread.saves = True
    try:
        saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        _thread.saves = False
    rules = {path: spec.get_config() for path, spec in model.head_masks.items()}
    file = pathlib.Path(save_directory, FILE)
    file.write_text(json.dumps(rules, indent=2) + "\n")
    warnings.warn(
        f"The model's files do not hold its head masks, which are in {file}: after "
        f"`from_pretrained` call `hm.hugging_face.mask_heads(model, {str(file)!r})`.",
        UserWarning,
        stacklevel=2,
    )
    return saved


def _warn_of_state(model: Any, *_: Any) -> None:
    if not _thread.saves:
        warnings.warn(
            f"The weights of {type(model).__name__} were read, as where a model around it is "
            "saved: its head masks are not among them. Its own `save_pretrained` writes both.",
            UserWarning,
            stacklevel=3,
        )


_REPLACED = {"save_pretrained": _save, "prepare_inputs_for_generation": _prepare}  # of a model
