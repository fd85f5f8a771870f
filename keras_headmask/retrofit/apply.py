"""A mask for every head of a model people already have."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.retrofit.adapters import (
    OF_KERAS,
    AttentionLayer,
    adapted,
    errors_naming,
    holds,
)
from keras_headmask.retrofit.find import Found, specs_by_layer
from keras_headmask.retrofit.frame import (
    ALONE,
    STATE,
    LayerRule,
    Source,
    in_own_function,
    is_masked,
    names_in,
    rules_of,
    spec_of,
    were_traced,
)
from keras_headmask.retrofit.masked_model import MaskedModel, drop_compiled, masked, unmask
from keras_headmask.rules.base import MaskSpec, check_heads, merged_inputs, restricts
from keras_headmask.rules.protocol import InputType
from keras_headmask.rules.words import aligned, numbers_in_words

Pairs = list[tuple[Any, Any]]  # each layer with its twin in the copy; the model itself, too
_WAYS = ("error", "and", "replace")


def apply_head_masks(
    model: keras.Model,
    mask_spec: MaskSpec | Mapping[Any, Any],
    layers: Any = None,
    existing: str = "error",
    copy: bool = True,
    add_inputs: bool = False,
    ignore: Any = (),
) -> keras.Model:
    """`model` with a mask for every head of its attention layers; same weights, names and outputs.

    The result obeys whenever it is called: alone, as a layer of another model, in `fit`, `predict`
    and `generate`, in files and exports. (`import keras_headmask` before loading a file.) The rule
    is ANDed with whatever masks the model has of its own. The model keeps its class:
    KerasHub's `GPT2CausalLM` generates under the rule. What is built from layers *inside* it raises
    at its first call: mask last, or call the masked model as a layer,
    `keras.Model(masked.input, head(masked.output))`.

    What the rule reads is taken from the inputs of each call by name; of a subclassed model, from
    its arguments and the keys of dicts. With `add_inputs=True`, a name that a graph lacks becomes a
    new `keras.Input`, integer or boolean `(batch, length)`, at the end of a list of inputs or under
    its name in a dict of them. (`MaskInput`: `(batch, heads, queries, keys)`.) In cross-attention,
    a rule that reads `x` on both sides takes the inputs `decoder_x` and `encoder_x` if the model
    has them, and else `query_x` and `key_x`.

    The ids of a rule are read in the order and the dtype of the model's input: a model that
    reverses, shifts or packs its sequence must get ids in the order that attention sees, and an
    int32 input cuts ids of 64 bits, as in any Keras model.

    Attention is known by its class. What else may attend is an error until `ignore` names it: a
    layer or model whose code is not of Keras or KerasHub, also around attention that is known, a
    `Lambda`, a class named for attention, and a softmax in a graph that has a product of two
    tensors, too.

    Args:
        model: A model that holds `keras.layers.MultiHeadAttention`, a subclass that computes by
            `_compute_attention`, `PerHeadMaskedMultiHeadAttention`, or the attention of KerasHub's
            Llama, Gemma and others (docs/generate.md: a rule names their query heads), in nested
            layers and models too: functional, Sequential or subclassed.
        mask_spec: A `MaskSpec`, its config, or a mapping from selectors of layers to specs:
            `{"0-1": a, "2": b}`. (Not `2: b`: a number may mean a head.)
        layers: Which attention layers: `None` for all self-attention; a number, counted over
            self-attention in forward order; an inclusive range `"0-3"`; a regex on layer paths,
            such as `"decoder.*cross"`, which alone names cross-attention; a tuple or list of
            those. Self or cross is known by the tensors of the calls, and else by the name.
        existing: What to do where a layer has a rule already: `"error"`, `"and"` or `"replace"`. A
            model around a masked one may only add to its rule.
        copy: Whether to leave `model` as it is and return a copy, not compiled. With `False` the
            model itself is masked, and stays compiled. Keras retraces `fit` and `predict`, also of
            models around it. A `tf.function`, `jax.jit` or `torch.compile` of your own that has
            traced it, inside of a layer, too, goes on without the rule: make it anew.
        add_inputs: Whether the model gets a new input for each name that the rule reads and the
            model lacks. With `False` such a name is an error.
        ignore: A regex on paths, or a list of them: layers and operations that may attend without
            the rule, if they do. A model itself goes by its name. Not needed with `layers`, which
            leaves all others as they are.

    Returns:
        A Keras model. `mask_specs`, `summary_masks` and `unmasked` of this package take it, and
        any model that is made of it.

    Raises:
        TypeError: if `model` is not a Keras model; if a spec or selector is of another type.
        ValueError: if a selector names no layer, the key of a mapping is a number, no input of the
            model has a name that the rule reads (unless `add_inputs=True`), something may attend
            without the rule that neither `ignore` nor `layers` allows, a layer gets two rules, a
            spec names a head >= `num_heads`, it is unclear whether a layer is self-attention and no
            regex names it, the class of a layer overrides how Keras computes attention, `existing`
            or `ignore` is not valid, copying the model is not possible, a Sequential model has no
            graph yet, or attention runs in a `tf.function` inside the model. From the result, when
            a call lacks what a rule reads, and when a layer of it is called, cloned or saved
            outside of it.
        RuntimeError: from the result, when a masked layer does not use its rule, or runs in a
            `tf.function` inside the model.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence, summary_masks
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, PerHead({0: SameSentence(9)}))
    >>> summary_masks(masked)
    0  attention  MultiHeadAttention  2 heads  self  PerHead({0: SameSentence((9,))})
    >>> masked(np.array([[5, 9, 6, 9]])).shape == (1, 4, 8)
    True
    """
    if isinstance(mask_spec, keras.Model):
        raise TypeError(
            "`mask_spec` must be a rule. Received a model: the model comes first, "
            "`hm.apply_head_masks(model, rule)`."
        )
    if hasattr(model, "set_attn_implementation"):
        used = "use `hm.hugging_face.mask_heads(model, rule)`."
        raise TypeError(f"{type(model).__name__} is a PyTorch model: {used}")
    found = Found(model)
    _check_model(found)
    if existing not in _WAYS:
        raise ValueError(f"`existing` must be one of {_WAYS}. Received: {existing!r}.")
    specs = specs_by_layer(mask_spec, layers, found, ignore)
    entries = [found.known[i] for i in specs]
    pairs = zip(entries, specs.values(), strict=True)
    planned = [(entry, _rule(found, entry, spec, existing)) for entry, spec in pairs]
    inputs = added_inputs(found, planned, add_inputs)
    for entry, one in planned:
        _check_obeys(entry, one.spec)
        if id(entry.layer) in found.in_functions:
            raise ValueError(in_own_function(entry.layer.name))
    twins = [(entry.layer, entry.layer) for entry in entries]
    if copy:
        model, twins = copied(model, found.untracked)
    else:
        drop_compiled([entry.layer for entry in entries])
    of_model = {id(layer): twin for layer, twin in twins}
    obeying = [(of_model[id(entry.layer)], one) for entry, one in planned]
    # (A copy's function may have been traced, too, when the copy was built.)
    for layer in were_traced(_keras.layers_of(model), [layer for layer, _ in obeying]):
        raise ValueError(in_own_function(layer.name))
    return masked(model, obeying, inputs)


def _check_model(found: Found) -> None:
    model = found.model
    if is_masked(model) and not isinstance(model, MaskedModel):
        what = f"A rule was given to '{model.name}', a part"
        raise ValueError(ALONE.format(what=what, model=vars(model)[STATE].owner.name))
    if isinstance(model, keras.Sequential) and (found.graph is None or not model.built):
        raise ValueError(
            f"The Sequential model '{model.name}' has no graph yet: start it with a keras.Input, "
            "or call its `build`, before it gets a rule."
        )


def _rule(found: Found, entry: AttentionLayer, spec: MaskSpec, existing: str) -> LayerRule:
    """The rule of one layer, joined with the one that the model gave it before."""
    layer, model, beneath = entry.layer, found.model, spec_of(entry.layer)
    if existing == "error" and beneath is not None:
        raise ValueError(
            f"The attention layer {entry} has a rule already: {beneath!r}. Pass existing='and' to "
            "keep both, or existing='replace'."
        )
    own = next((rule for rule in rules_of(layer) if rule.owner is model), None)
    others = [rule.owner for rule in rules_of(layer) if rule is not own]
    held = all(holds(model, owner) for owner in others)
    if others and (not held or existing == "replace"):
        why = "inside, which a rule from around may only add to" if held else "around"
        raise ValueError(
            f"The attention layer {entry} has a rule of the model '{others[0].name}' {why}. Give "
            "this rule to that model."
        )
    if own is not None and existing == "and":
        spec = own.spec & spec
    own_spec = getattr(layer, "mask_spec", None)  # of a layer of ours
    replaces = own_spec is not None and (existing == "replace" or getattr(own, "replaces", False))
    spec.get_config()  # raises for a spec that could not be saved
    with errors_naming(entry):
        check_heads(spec, entry.num_heads, adapted(layer).num_key_heads)
    sources = sources_of(entry, spec, found.inputs)
    return LayerRule(spec, entry.num_heads, sources, replaces, is_cross=entry.kind == "cross")


def _check_obeys(entry: AttentionLayer, spec: MaskSpec) -> None:
    """Raise if the class of a layer computes attention by code of its own that no adapter knows."""
    adapter = adapted(entry.layer)
    is_of_keras = isinstance(entry.layer, OF_KERAS)
    if is_of_keras and adapter.overridden and restricts(spec, adapter.num_heads):
        raise ValueError(
            f"The attention layer {entry} takes no rule: its class overrides "
            f"`{adapter.overridden}`, where a rule holds. Leave the layer out by `layers=`, or do "
            "not override that."
        )


def mask_specs(model: keras.Model) -> dict[str, MaskSpec]:
    """The rule of each attention layer of `model` that has one, by the path of the layer.

    Args:
        model: Any Keras model: a masked one, one built on its layers or its tensors, one that holds
            it, or one with layers of `PerHeadMaskedMultiHeadAttention`.

    Returns:
        All that a layer obeys, as one spec: its own rule and those of `apply_head_masks`.

    >>> import keras_headmask as hm
    >>> x = keras.Input((None, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> mask_specs(hm.apply_head_masks(model, hm.Window(1, 1)))
    {'attention': Window(before=1, after=1)}
    """
    return Found(model).rules


def summary_masks(model: keras.Model, print_fn: Callable[[str], Any] = print) -> None:
    """Print the attention layers: numbers, path, class, heads, self, cross or unclear, rule.

    The numbers are those by which `layers` of `apply_head_masks` names self-attention. Layers with
    equal rules, and paths that differ in numbers alone, are one row: `*` stands for the numbers.

    Args:
        model: Any Keras model.
        print_fn: Called with each line.
    """
    rows: dict[tuple[str, ...], list[tuple[int | None, str]]] = {}
    for number, entry in Found(model).numbered():
        heads = f"{'?' if entry.num_heads is None else entry.num_heads} heads"
        name, spec = type(entry.layer).__name__, repr(spec_of(entry.layer))
        equal = _NUMBER.sub("", entry.path), name, heads, entry.kind, spec
        rows.setdefault(equal, []).append((number, entry.path))
    lines = []
    for (_, *row), layers in rows.items():
        numbers, paths = zip(*layers, strict=True)
        place = "-" if None in numbers else numbers_in_words(numbers)
        of_all = f"{_NUMBER.sub('*', paths[-1])} ({len(paths)} layers)"
        lines.append((place, of_all if len(paths) > 1 else paths[0], *row))
    for line in aligned(lines):
        print_fn(line)


_NUMBER = re.compile(r"_?\d+")


def unmasked(model: keras.Model) -> keras.Model:
    """A stock model with the weights of `model`, without the rules of `apply_head_masks`.

    `model` stays as it is. A layer of `PerHeadMaskedMultiHeadAttention` keeps its own rule.

    Args:
        model: Any Keras model with masked layers: cut, extended, nested.

    Returns:
        A copy, not compiled. Inputs that the rules alone read are gone.

    Raises:
        ValueError: if copying the model is not possible.
    """
    found = Found(model)
    return unmask(copied(model, found.untracked)[0])


# --- Which inputs rules read ----------------------------------------------------------------------


def added_inputs(found: Found, planned: list[Any], add_inputs: bool) -> list[Any]:
    """A new input for each name that a rule reads and the graph lacks; none without a graph.

    `planned` are pairs of a layer and a rule. Raises if a rule could not read what it needs.
    """
    if found.graph is None:
        return []
    inputs = found.graph.input
    if isinstance(inputs, dict):
        read = {name for _, rule in planned for name in rule.spec.inputs}
        other = {key: t.name for key, t in inputs.items() if hasattr(t, "name") and t.name != key}
        if wrong := sorted(k for k, name in other.items() if k in read or name in read):
            raise ValueError(
                f"The model takes its input {wrong[0]!r} under that key, but the tensor is named "
                f"{other[wrong[0]]!r}, so the rule is ambiguous. Give keras.Input the name of its "
                "key."
            )
    for entry, rule in planned:
        ids = [name for name, kind in rule.spec.inputs.items() if kind.rank is not None]
        if ids and entry.runs_on_two:
            raise ValueError(
                f"The attention layer {entry} is called on two sequences, or on one that a "
                f"further input changes between the calls, and {ids} belong to one sequence. Give "
                "the rule to the model that both share (`apply_head_masks(encoder, ...)`), and "
                "call the result on each with its own ids."
            )
    new = new_inputs(found.inputs, [rule for _, rule in planned])
    taken = {layer.name for layer in found.model.layers}
    if clash := sorted(taken & set(new)):
        raise ValueError(
            f"The rule reads {clash[0]!r}. The model has no such input, and none can be added, "
            "since a layer has that name. Give the mask input another name."
        )
    if new and not add_inputs:
        raise ValueError(
            f"The rule reads {sorted(new)}, and the model has no inputs of those names. Its inputs "
            f"are {sorted(found.inputs)}. Name one of them in the rule (`input=...`), or pass "
            "add_inputs=True, which adds what is missing as new inputs of the model."
        )
    return list(new.values())


def sources_of(
    entry: AttentionLayer, spec: MaskSpec, available: Mapping[str, Any]
) -> dict[str, Source]:
    """The one of the `available` inputs, or the pair, from which each name in `spec` is read."""
    sources: dict[str, Source] = {}
    for name, kind in spec.inputs.items():
        if entry.kind == "self" or kind.rank is None:
            sources[name] = name
        elif kind.sides == {"query"}:
            sources[name] = (name, None)
        elif kind.sides == {"key"}:
            sources[name] = (None, name)
        else:
            pairs = (f"decoder_{name}", f"encoder_{name}"), (f"query_{name}", f"key_{name}")
            known_pairs = [pair for pair in pairs if set(pair) <= set(available)]
            if entry.kind == "unclear" and not known_pairs:
                raise ValueError(
                    f"{entry.why_unclear} Name the layer by 'self' or 'cross' "
                    "(`MultiHeadAttention(..., name='self_attention')`), or give the model the "
                    f"inputs {pairs[1]}, which say the side of {name!r}."
                )
            sources[name] = known_pairs[0] if known_pairs else pairs[1]
    return sources


def new_inputs(available: Mapping[str, Any], rules: Iterable[LayerRule]) -> dict[str, Any]:
    """A `keras.Input` for each name that is not `available`; what is there is checked."""
    kinds: dict[str, InputType] = {}
    heads: dict[str, int] = {}
    rules = list(rules)
    merged_inputs(tuple(rule.spec for rule in rules))  # raises for one name of two kinds
    for rule in rules:
        for name, source in rule.sources.items():
            kind = rule.spec.inputs[name]
            for place in names_in(source):
                known = kinds.get(place, kind)
                dtype = known.dtype if known.dtype == kind.dtype else "int32"
                kinds[place] = kind._replace(dtype=dtype)
                if kind.rank is None and heads.setdefault(place, rule.num_heads) != rule.num_heads:
                    raise ValueError(
                        f"The whole mask {place!r} is read by layers of {heads[place]} and of "
                        f"{rule.num_heads} heads. Give each its own name."
                    )
    new = {}
    for name, kind in sorted(kinds.items()):
        if name not in available:
            shape = (None,) if kind.rank is not None else (heads[name], None, None)
            new[name] = keras.Input(shape, dtype=kind.dtype, name=name)
            continue
        tensor = available[name]
        if kind.rank is not None and len(tensor.shape) != 2:
            raise ValueError(
                f"The mask spec reads {name!r} as one value per position, (batch, length), but the "
                f"model's input of that name has shape {tuple(tensor.shape)}. Give the mask input "
                "another name."
            )
        if "float" in tensor.dtype:
            raise TypeError(
                f"The mask spec reads the model's input {name!r}, which has dtype {tensor.dtype}: "
                "ids must be integers or booleans, since floats get rounded. Give the mask input "
                "another name."
            )
    return new


# --- Copies ---------------------------------------------------------------------------------------


def copied(model: keras.Model, untracked: list[str]) -> tuple[Any, Pairs]:
    """A copy of `model` with its rules, weights and training state, and its layers with theirs.

    `untracked`: weights that it reads and Keras does not track.
    """
    unregistered: dict[str, type] = {}
    for layer in _keras.layers_of(model):
        cls = _class_in_config(layer)
        name = cls.__name__
        is_known = keras.saving.get_registered_name(cls) != name or cls.__module__.startswith(
            ("keras.", "keras_hub.")
        )
        if not is_known and unregistered.setdefault(name, cls) is not cls:
            raise ValueError(
                f"Copying the model '{model.name}' is not possible: its config would confuse two "
                f"classes named '{name}'. Register them under two names, by "
                "keras.saving.register_keras_serializable, or, for a rule, pass copy=False, which "
                "masks the model itself."
            )
    try:
        if untracked:
            raise ValueError(
                f"it uses weights that Keras does not track, so a copy would lack them: "
                f"{untracked}. Assign the layers that have them to attributes of those "
                "that call them."
            )
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        pairs = _in_pairs(model, twin)
        _copy_training_state(pairs)
        _copy_weights(model, twin)
        _copy_other_state(pairs)
        _check_values(pairs)
    except Exception as error:  # (the config of a layer may raise anything)
        raise ValueError(
            f"Copying the model '{model.name}' is not possible: {error} Fix that, or, for a rule, "
            "pass copy=False, which masks the model itself."
        ) from error
    return twin, pairs


def _class_in_config(layer: Any) -> type:
    """The class that a config names: layers of masked models have classes made for each."""
    return getattr(type(layer), "_stock_class", type(layer))


def _in_pairs(source: keras.Model, target: keras.Model) -> Pairs:
    """The layers of both by the paths that files have, each before the layers inside it.

    A layer without state may lack a twin: KerasHub's preprocessors make some at their first text.
    """
    twins = _keras.layers_in_file(target)
    pairs = []
    for path, layer in _keras.layers_in_file(source).items():
        twin = twins.get(path)
        if _class_in_config(twin) is _class_in_config(layer):
            pairs.append((layer, twin))
        elif layer.weights or hasattr(layer, "save_assets"):
            raise ValueError(
                f"its config makes a model without the layer {path!r} ({type(layer).__name__}), "
                "whose state would be lost."
            )
    return pairs


def _copy_training_state(pairs: Pairs) -> None:
    """Adapters, what is rematerialised, and which layers are frozen: no config holds them."""
    for layer, twin in pairs:
        if getattr(twin, "compiled", False):
            _keras.uncompile(twin, layer)
        if getattr(layer, "lora_enabled", False) and not getattr(twin, "lora_enabled", False):
            twin.enable_lora(layer.lora_rank, lora_alpha=layer.lora_alpha)
        _keras.copy_modes(layer, twin)
    for layer, twin in pairs:  # from the outside in, since setting it sets all layers inside
        if twin.trainable != layer.trainable:
            twin.trainable = layer.trainable


def _check_values(pairs: Pairs) -> None:
    """Raise if a graph has values that no config holds, as that of KerasHub's Gemma 3n."""

    def values(layer: Any) -> list[Any]:
        graph = _keras.functional_of(layer)
        nodes = _keras.nodes(graph) if isinstance(graph, _keras.Functional) else ()
        given = [(node.arguments.args, node.arguments.kwargs) for node in nodes]
        tensors = filter(keras.ops.is_tensor, keras.tree.flatten(given))
        return list(map(keras.ops.convert_to_numpy, tensors))

    for layer, twin in pairs:
        mine, theirs = values(twin), values(layer)
        if len(mine) != len(theirs) or not all(map(np.array_equal, mine, theirs)):
            raise ValueError(f"the graph of '{layer.name}' has values that no config holds.")


def _copy_other_state(pairs: Pairs) -> None:
    """State outside the weights: what layers derive from them, and vocabularies."""
    for layer, twin in pairs:
        if hasattr(layer, "finalize_state"):  # a Normalization, say, that was adapted
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            twin.load_own_variables({k: keras.ops.convert_to_numpy(v) for k, v in store.items()})
        if hasattr(layer, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                if any(pathlib.Path(folder).iterdir()):
                    twin.load_assets(folder)


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    if [w.shape for w in target.weights] == [w.shape for w in source.weights]:
        for new, weight in zip(target.weights, source.weights, strict=True):
            new.assign(keras.ops.copy(weight.value))  # JAX and torch would share the memory
            new.trainable = weight.trainable  # LoRA freezes the kernel alone, not its layer
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)
