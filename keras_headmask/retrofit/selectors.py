"""Which attention layers a model holds, and which of them a selector names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.retrofit import reachable, tracing
from keras_headmask.rules.base import MaskSpec, check_spec

_NUMBERS = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*", re.ASCII)


class AttentionLayer(NamedTuple):
    """An attention layer and the names of the layers around it, outermost first.

    `kind` is "self", "cross", or "unclear". `place` is its number in files: it counts the layers by
    the attributes that hold them, which is the same wherever a model is loaded. `runs_on_two`: it
    is called more than once, on two sequences, or on what further inputs made of one. `untracked`:
    it is held where Keras does not track it.
    """

    layer: keras.layers.MultiHeadAttention
    path: str
    kind: str
    place: int = -1
    runs_on_two: bool = False
    untracked: bool = False

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.layer).__name__})"


class Found(NamedTuple):
    """The attention layers of a model in forward order, and those that no rule reaches."""

    known: list[AttentionLayer]
    unknown: list[AttentionLayer]


def find_attention(model: keras.Model) -> Found:
    """Every attention layer inside `model`, in nested layers and models too, each once."""
    found = Found([], [])
    seen: set[int] = set()
    paths: dict[str, int] = {}
    shown: dict[int, list[str | None]] = {}  # in forward order
    streams: dict[int, set[Any]] = {}
    for call in tracing.attention_calls(model):
        shown.setdefault(id(call.layer), []).append(call.shows)
        key = None if call.stream is None else call.stream.key
        streams.setdefault(id(call.layer), set()).add(key)
    by_hand = {id(x) for x in _softmaxes_of_attention(model)}
    for path, layer in _walk(model, ""):
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        paths[path] = paths.get(path, 0) + 1
        if paths[path] > 1:  # layers inside a layer may share a name
            path = f"{path}#{paths[path]}"
        kind = _kind(layer.name.lower(), shown.get(id(layer), [None]))
        on_two = len(streams.get(id(layer), set()) - {None}) > 1
        entry = AttentionLayer(layer, path, kind, runs_on_two=on_two)
        if isinstance(layer, keras.layers.MultiHeadAttention):
            if _calls_the_hook(type(layer)):
                found.known.append(entry._replace(place=len(found.known)))
            else:
                found.unknown.append(entry)
        elif _attends_by_itself(layer) or id(layer) in by_hand:
            found.unknown.append(entry)
    if _runs_attention_code(model):
        found.unknown.append(AttentionLayer(model, model.name, "unclear"))
    for path, layer in reachable.untracked_layers(model):
        if _holds_attention(layer):
            entry = AttentionLayer(layer, path, _kind(layer.name.lower(), [None]), untracked=True)
            found.unknown.append(entry)
    if all(id(entry.layer) in shown for entry in found.known):
        order = {layer: number for number, layer in enumerate(shown)}
        found.known.sort(key=lambda entry: order[id(entry.layer)])
    return found


def _kind(name: str, shown: list[str | None]) -> str:
    """Whether a layer attends to its own sequence, by what its calls show, and then by its name."""
    if tracing.OTHER in shown:
        return "cross"
    if set(shown) == {tracing.SAME}:
        return "self"
    if "cross" in name:
        return "cross"
    if "self" in name or not {tracing.UNKNOWN, None} & set(shown):
        return "self"
    return "unclear"


def _walk(layer: keras.Layer, path: str) -> Iterator[tuple[str, keras.Layer]]:
    """Paths and layers inside `layer`, in forward order as far as the graph shows it."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return  # its projections are no attention of their own
    inner = list(layer.layers) if isinstance(layer, keras.Model) else []
    seen = {id(x) for x in inner}
    inner += [x for x in _keras.sublayers(layer) if id(x) not in seen]
    # Operations without a layer: `keras.ops.dot_product_attention` in a graph, say.
    if isinstance(layer, _keras.Functional):
        inner += [x for x in layer.operations if not isinstance(x, keras.Layer)]
    for child in inner:
        place = f"{path}/{child.name}" if path else child.name
        yield place, child
        yield from _walk(child, place)


def _attends_by_itself(layer: keras.Layer) -> bool:
    """Whether a layer computes attention that no hook reaches, as far as names and code show.

    One named for attention does, unless it leaves that to layers inside, and so does one whose code
    names an operation for attention, or a softmax if it is named for attention itself. (The code:
    methods, what they call and close over, functions in attributes: see `reachable`.)
    """
    named = _is_attention_by_name(layer)
    if named and not any(
        _is_attention_by_name(inner) or isinstance(inner, keras.layers.MultiHeadAttention)
        for _, inner in _walk(layer, "")
    ):
        return True
    return _runs_attention_code(layer, named)


def _runs_attention_code(layer: keras.Layer, named: bool = False) -> bool:
    reads = reachable.names_in_code(layer)
    return any(_OPERATION.search(name) for name in reads) or (named and "softmax" in reads)


_OPERATION = re.compile("dot_product_attention|DotProductAttention")


def _holds_attention(layer: keras.Layer) -> bool:
    return any(
        isinstance(x, keras.layers.MultiHeadAttention) or _attends_by_itself(x)
        for x in _keras.layers_of(layer)
    )


def _softmaxes_of_attention(model: keras.Model) -> Iterator[Any]:
    """The softmax of attention that a graph spells out: of (..., queries, keys), then a product."""
    for graph in _keras.layers_of(model):
        if not isinstance(graph, _keras.Functional):
            continue
        nodes = list(_keras.nodes(graph))
        readers: dict[int, list[Any]] = {}
        for node in nodes:
            for tensor in node.input_tensors:
                readers.setdefault(id(tensor), []).append(node)
        for node in nodes:
            if (
                _is_softmax(node.operation)
                and any(map(_may_be_weights, node.outputs))
                and not _is_of_single_positions(node.outputs[0])
            ):
                waiting, seen = list(node.outputs), set()
                while waiting:
                    tensor = waiting.pop()
                    for reader in readers.get(id(tensor), ()):
                        if type(reader.operation).__name__ in _PRODUCTS:
                            yield node.operation
                            waiting = []
                            break
                        if id(reader) not in seen and any(map(_may_be_weights, reader.outputs)):
                            seen.add(id(reader))
                            waiting += reader.outputs


_PRODUCTS = "Matmul", "Einsum", "Dot", "Tensordot"


def _is_softmax(operation: Any) -> bool:
    named = getattr(getattr(operation, "activation", None), "__name__", "")
    return type(operation).__name__ == "Softmax" or named == "softmax"


def _may_be_weights(tensor: Any) -> bool:
    """Whether a tensor has an axis of queries before one of keys: in self-attention, as long.

    (One row of weights alone pools a sequence.)
    """
    shape = tuple(tensor.shape)
    return len(shape) > 2 and shape[-2] != 1 and (shape[-1] is None or shape[-1] == shape[-2])


_DENSE = "Dense", "EinsumDense"


def _is_of_single_positions(tensor: Any) -> bool:
    """Whether numbers come from a Dense of one position each, as the shares of experts do.

    Those of attention come from pairs of positions: a product, a sum that broadcasts, or code that
    the graph does not show.
    """
    waiting, seen = [tensor], {id(tensor)}
    while waiting:
        tensor = waiting.pop()
        operation, inputs = _keras.made_by(tensor)
        name = type(operation).__name__
        if name in _DENSE and len(inputs[0].shape) <= 3:
            continue
        if name in _PRODUCTS or not _is_shown(operation):
            return False
        if len(inputs) > 1:
            inputs = [x for x in inputs if x.shape == tensor.shape]
        if not inputs or any(len(x.shape) > len(tensor.shape) for x in inputs):
            return False  # (a sum over features, say, of products of pairs)
        waiting += [x for x in inputs if id(x) not in seen]
        seen.update(map(id, inputs))
    return True


def _is_shown(operation: Any) -> bool:
    """Whether it is one of Keras' own, which runs no code of others."""
    is_own = _keras.is_own_op(operation) or _keras.is_own_layer(operation)
    return is_own and not isinstance(operation, (keras.layers.Lambda, keras.layers.Wrapper))


def _is_attention_by_name(layer: keras.Layer) -> bool:
    name = type(layer).__name__.lower()
    _, found, rest = name.partition("attention")
    return bool(found) and "mask" not in rest  # one that makes attention masks does not attend


def _calls_the_hook(cls: Any) -> bool:
    """Whether `call` runs `_compute_attention`, as far as its code shows.

    A class that hides it better fails in its first forward, where its rule is not used.
    """
    code = getattr(cls.call, "__code__", None)
    return code is None or bool({_keras.COMPUTE_ATTENTION, "super"} & set(code.co_names))


def specs_by_layer(
    mask_spec: MaskSpec | Mapping[Any, Any], layers: Any, found: Found
) -> dict[int, MaskSpec]:
    """The spec of each selected layer, by its number among `found.known`."""
    is_config = isinstance(mask_spec, Mapping) and "kind" in mask_spec
    if isinstance(mask_spec, Mapping) and not is_config:
        if layers is not None:
            raise ValueError(
                "`layers` and a mapping from layers to specs say the same twice: give one of them. "
                f"Received: layers={layers!r}."
            )
        if not mask_spec:
            raise ValueError("`mask_spec` is an empty mapping: it names no layer.")
        pairs = list(mask_spec.items())
        for selector, _ in pairs:
            _refuse_number(selector)
    else:
        pairs = [(layers, mask_spec)]
    chosen: dict[int, MaskSpec] = {}
    for selector, spec in pairs:
        if isinstance(spec, Mapping):
            spec = MaskSpec.from_config(spec)
        check_spec(spec, "mask_spec", "hm.apply_head_masks(model, SPEC)")
        for number in select(found, selector):
            if number in chosen:
                raise ValueError(
                    f"The layer {found.known[number]} has two rules, the second from "
                    f"{selector!r}. Name each layer once, or combine the rules with &."
                )
            chosen[number] = spec
    return dict(sorted(chosen.items()))


def _refuse_number(key: Any) -> None:
    """Raise for a key of a mapping that `PerHead` would read as a head."""
    parts = key if isinstance(key, (tuple, list, range)) else (key,)
    numbers = tuple(int(part) for part in parts if _is_number(part))
    if numbers:
        text = ",".join(map(str, numbers))
        if isinstance(key, range) and key.step == 1 and len(key) > 1:
            text = f"{key.start}-{key.stop - 1}"
        heads = numbers if len(numbers) > 1 else numbers[0]
        raise ValueError(
            f"The key {key!r} may mean a layer or a head. For layers write it as a text: "
            f'`{{"{text}": ...}}`. For heads of all layers: `PerHead({{{heads}: ...}})`.'
        )


def select(found: Found, selector: Any) -> list[int]:
    """The numbers of the layers that `selector` names: see `apply_head_masks`."""
    of_self = [i for i, entry in enumerate(found.known) if entry.kind == "self"]
    if selector is None:
        if found.unknown:
            message = _out_of_reach(found.unknown[0])
            if not found.unknown[0].untracked:
                message += (
                    " Known are keras.layers.MultiHeadAttention and its subclasses that compute by "
                    "`_compute_attention`."
                )
            if found.known:
                message += f" To leave it as it is, name the others in `layers`: {_names(found)}."
            raise ValueError(message)
        _check_all_clear(found)
        if not of_self:
            raise ValueError(
                "The model holds no self-attention layer (keras.layers.MultiHeadAttention or a "
                f"subclass). Attention layers: {_names(found) or 'none'}. Cross-attention is "
                "masked only when `layers` names it."
            )
        return of_self
    if isinstance(selector, str) and not selector:
        raise ValueError("`layers` is an empty text: it names no layer. None names all.")
    if isinstance(selector, (tuple, list, range)) or bool(getattr(selector, "ndim", 0)):
        numbers: set[int] = set()
        numbers.update(*(select(found, part) for part in selector))
        if not numbers:
            raise ValueError(f"{selector!r} names no layer.")
        return sorted(numbers)
    if isinstance(selector, str) and not _NUMBERS.fullmatch(selector):
        return _matching(found, selector)
    _check_all_clear(found)
    return [of_self[n] for n in _numbers(selector, len(of_self))]


def _out_of_reach(entry: AttentionLayer, named: str = "") -> str:
    if entry.untracked:
        return (
            f"The attention layer {entry}{named} is held where Keras does not track it: no rule "
            "would hold there, and a copy or a file would lack its weights. Assign it to an "
            "attribute of the layer that calls it."
        )
    return (
        f"The attention layer {entry}{named} is of a class whose masks cannot be reached: the rule "
        "would not hold there."
    )


def _check_all_clear(found: Found) -> None:
    """Raise if what is self-attention, and so its numbers, is not known of all layers."""
    if unclear := [entry for entry in found.known if entry.kind == "unclear"]:
        raise ValueError(
            f"Cannot tell whether the attention layer {unclear[0]} attends to its own sequence or "
            f"to another. Name the layers by regexes on their paths in `layers`: {_names(found)}."
        )


def _is_number(x: Any) -> bool:
    is_integer = hasattr(type(x), "__index__") and getattr(x, "shape", ()) == ()
    return is_integer and not isinstance(x, bool)


def _numbers(selector: Any, count: int) -> list[int]:
    """3, "3", "1-3" or "0,2-3" as numbers below `count`."""
    if not (isinstance(selector, str) or _is_number(selector)):
        raise TypeError(
            "Layers are named by None (all self-attention), a number, an inclusive range '0-3', a "
            f"regex on layer paths, or a tuple or list of those. Received: {selector!r}."
        )
    numbers: list[int] = []
    for part in str(selector).split(","):
        first, dash, last = part.strip().partition("-")
        if not dash or not first:  # one number, a negative one perhaps
            first = last = part
        if int(first) > int(last):
            raise ValueError(f"The range {part.strip()!r} of layers runs backwards.")
        numbers.extend(range(int(first), int(last) + 1))
    beyond = [n for n in numbers if not 0 <= n < count]
    if beyond:
        raise ValueError(
            f"There is no self-attention layer {beyond[0]}: the model has {count}, numbered from 0 "
            f"in forward order. Received: {selector!r}."
        )
    return numbers


def _matching(found: Found, pattern: str) -> list[int]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`layers` is no regex: {pattern!r} ({error}).") from error
    unknown = [entry for entry in found.unknown if regex.search(entry.path)]
    if unknown:
        raise ValueError(_out_of_reach(unknown[0], f", which {pattern!r} names,"))
    numbers = [i for i, entry in enumerate(found.known) if regex.search(entry.path)]
    if not numbers:
        raise ValueError(
            f"No attention layer's path matches {pattern!r}. Paths: {_names(found) or 'none'}."
        )
    return numbers


def _names(found: Found) -> str:
    paths = [repr(entry.path) for entry in found.known]
    return ", ".join(paths if len(paths) <= 8 else [*paths[:7], f"... ({len(paths)} layers)"])
