"""`hm.explain`: which kernel computes attention, which refused and why, how much it computes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_headmask.attention import choose, cpu, looking, parts, tiles_python
from keras_headmask.attention.api import dot_product_attention
from keras_headmask.attention.kernels import ByGroup, first
from keras_headmask.attention.parts import Part
from keras_headmask.attention.request import Request
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.finding import find_attention
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.words import enough_heads, heads_in_words, listed

_LENGTH = 1024  # by which shares are counted where lengths are not known
_SIZE = 8  # of what a layer is given: it decides nothing


@dataclasses.dataclass(frozen=True)
class OfHeads:
    """Heads that are computed together: by which kernel, and the share of all pairs that it does.

    The share is by what positions show; ids and flags may leave less.
    """

    heads: tuple[int, ...]
    kernel: str
    share: float

    def __str__(self) -> str:
        return f"{heads_in_words(self.heads)}, {self.kernel}: {self.share:.1%}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What computes one call of attention, and why; `str()` of it is for a reader.

    Args:
        name: The path of the layer, or the rule.
        kernel: Its name, as in the table of kernels in `docs/architecture.md`.
        groups: The heads that are computed together.
        lengths: Of the queries and keys, by which the shares are counted.
        refused: The kernels that were asked before, and why each refused.
        ways: What would change the choice.
    """

    name: str
    kernel: str
    groups: tuple[OfHeads, ...]
    lengths: tuple[int, int]
    refused: tuple[tuple[str, str], ...]
    ways: tuple[str, ...]

    def __str__(self) -> str:
        queries, keys = self.lengths
        of_heads = [f"{group} of {queries} x {keys} pairs" for group in self.groups]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused:
            by_reason.setdefault(reason, []).append(name)
        refused = [f"not {listed(names, 'or')}: {why}" for why, names in by_reason.items()]
        lines = [f"  {line}" for line in (*of_heads, *refused, *self.ways)]
        return "\n".join([f"{self.name}: {self.kernel}", *lines])


class Explanations(tuple[Explanation, ...]):
    """Of the attention layers of a model; a line for each. One of them by itself says more."""

    def __str__(self) -> str:
        lines = [f"{x.name}: {'; '.join(map(str, x.groups)) or x.kernel}" for x in self]
        ways = dict.fromkeys(way for x in self for way in x.ways)
        return "\n".join([*lines, *ways]) or "No attention layer that a rule reaches."


def explain(
    what: Any,
    queries: int | None = None,
    keys: int | None = None,
    batch: int = 1,
    num_heads: int | None = None,
    head_dim: int = 64,
    padding: bool = False,
    training: bool = False,
    tiled: bool | None = None,
) -> Any:
    """Say which code computes attention under a rule, which code refused and why.

    Nothing is computed but what stands around attention in a model, on zeros.

    Args:
        what: A rule, an attention layer of this package, or a functional or Sequential model.
        queries: Number of queries; `None`: not known when the graph is traced (TensorFlow alone).
        keys: Number of keys, for a rule or a layer; by default that of the queries.
        batch: Number of examples.
        num_heads: For a rule: number of heads; by default as many as it names, and one more.
        head_dim: For a rule: size of a head.
        padding: For a layer: whether its query has a mask of padding.
        training: For a layer or a model: whether dropout is drawn.
        tiled: For a rule: as in `hm.dot_product_attention`. A layer has its own.

    Returns:
        An `Explanation` of a rule or a layer; a tuple of them, which prints, for a model.

    Raises:
        TypeError: for anything else.
        ValueError: for lengths that are not known on JAX or PyTorch, or a model without inputs.

    >>> import keras_headmask as hm
    >>> found = explain(hm.PerHead({0: hm.Window(31, 0)}), queries=64, num_heads=4)
    >>> found.kernel
    'dense'
    """
    backend = keras.backend.backend()
    for name, number in (("queries", queries), ("keys", keys)):
        if number is not None:
            whole_number(number, name, at_least=1)
    whole_number(batch, "batch", at_least=1)
    if queries is None and backend != "tensorflow":
        raise ValueError(
            f"On {backend} lengths are known when code is compiled: pass `queries=`, for example "
            f"hm.explain(..., queries={_LENGTH})."
        )
    keys = queries if keys is None else keys
    if isinstance(what, MaskSpec):
        heads = enough_heads(what) if num_heads is None else num_heads
        query, key = (_Tensor((batch, length, heads, head_dim)) for length in (queries, keys))
        given = {"query": query, "key": key, "inputs": _inputs(what, batch, queries, keys)}
        call = functools.partial(_attend, what, tiled)
        return _explanations(call, given, queries, {None: repr(what)})[0]
    if isinstance(what, keras.Model):
        return _of_model(what, queries, batch, training)
    if isinstance(what, MaskedAttention):
        return _of_layer(what, queries, keys, batch, padding, training)
    raise TypeError(
        "`what` must be a rule, an attention layer of this package, or a model. (A layer of Keras "
        f"that `apply_head_masks` gave a rule is explained with its model.) Received: {what!r}."
    )


class _Tensor:
    """A shape, with `None` where a size is not known, and a dtype."""

    def __init__(self, shape: tuple, dtype: str = "float32"):
        self.shape, self.dtype = shape, dtype


def _inputs(spec: MaskSpec | None, batch: int, queries: Any, keys: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in ({} if spec is None else spec.inputs).items():
        if kind.rank is None:
            found[name] = _Tensor((batch, 1, queries, keys), "bool")
        elif queries == keys:
            found[name] = _Tensor((batch, keys), kind.dtype)
        else:
            found[name] = tuple(_Tensor((batch, n), kind.dtype) for n in (queries, keys))
    return found


def _attend(spec: MaskSpec, tiled: bool | None, query: Tensor, key: Tensor, inputs: Any) -> Tensor:
    more: dict[str, Any] = {"tiled": tiled, "query_offset": 0}
    return dot_product_attention(query, key, key, None, spec, inputs or None, **more)


def _of_layer(
    layer: Any, queries: Any, keys: Any, batch: int, padding: bool, training: bool
) -> Explanation:
    copy = type(layer).from_config(layer.get_config())
    query, value = (_Tensor((batch, length, _SIZE)) for length in (queries, keys))
    copy.build(query.shape, value.shape)
    given = {"query": query, "inputs": _inputs(copy.mask_spec, batch, queries, keys)}
    if queries != keys:
        given["value"] = value
    if padding:
        given["query_mask"] = _Tensor((batch, queries), "bool")

    def call(inputs: Any, **tensors: Tensor) -> Tensor:
        more = {"mask_inputs": inputs or None, "training": training, "query_offset": 0}
        return copy(**tensors, **more)

    return _explanations(call, given, queries, {None: layer.name})[0]


def _of_model(
    model: keras.Model, queries: int | None, batch: int, training: bool
) -> "Explanations":
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            "`hm.explain` needs the inputs of a model: a functional one, or a Sequential one that "
            f"is built. Received: {model!r}. Explain its attention layers one by one."
        )
    tensors = [
        _Tensor((batch, *(queries if n is None else n for n in x.shape[1:])), x.dtype)
        for x in inputs
    ]
    given = {"inputs": keras.tree.pack_sequence_as(model.input, tensors)}
    layers = {entry.layer: entry.path for entry in find_attention(model).known}

    def call(inputs: Any) -> Any:
        return model(inputs, training=training)

    return Explanations(_explanations(call, given, queries, layers))


# --- What is asked for ---------------------------------------------------------------------------


def _explanations(
    call: Callable, given: dict[str, Any], queries: int | None, names: dict[Any, str]
) -> list[Explanation]:
    """Of each attention in `call(**given)`; `names` has the layers to look at, or `None`."""
    running: list[Any] = [None]
    found: dict[Any, Explanation] = {}

    def watch(request: Request, part: Part) -> Tensor | None:
        layer = running[-1]
        if layer in names:
            found.setdefault(layer, _explained(names[layer], request, part, queries))
        if request.wants_probabilities:
            return None
        return ops.zeros_like(request.query[..., :1]) + request.value[:, :1, :1] * 0

    def entered(layer: Any) -> Callable:
        def run(usual: Callable, *args: Any, **kwargs: Any) -> Any:
            running.append(layer)
            try:
                return usual(*args, **kwargs)
            finally:
                running.pop()

        return run

    with contextlib.ExitStack() as stack:
        for layer in names:
            if layer is not None:
                stack.enter_context(looking.overriding(layer, "call", entered(layer)))
        stack.enter_context(choose.watched(watch))
        _run(call, given)
    own = "code of its class"  # no rule, a flash kernel, or a subclass
    return [
        found.get(layer, Explanation(name, own, (), (0, 0), (), ()))
        for layer, name in names.items()
    ]


def _run(call: Callable, given: dict[str, Any]) -> None:
    """Run `call` on zeros of those shapes; on TensorFlow trace it, which computes nothing."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        specs = keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), given)
        tf.function(lambda given: call(**given), autograph=False).get_concrete_function(specs)
        return
    with contextlib.nullcontext() if keras.backend.backend() == "jax" else _without_gradients():
        call(**keras.tree.map_structure(lambda x: ops.zeros(x.shape, x.dtype), given))


def _without_gradients() -> Any:
    import torch

    return torch.no_grad()


def _explained(name: str, request: Request, part: Part, queries: int | None) -> Explanation:
    kernels = choose.KERNELS[keras.backend.backend()]
    chosen = choose.choose(request, part)
    before = kernels[: kernels.index(chosen)]
    refused = [(kernel, kernel.refuses(request, part)) for kernel in before]
    length, keys = (
        known if isinstance(known, int) else queries or _LENGTH
        for known in (request.query.shape[1], request.key.shape[1])
    )
    groups = parts.by_rule(part)
    of_groups = []
    for group in groups:
        kernel = chosen
        if isinstance(chosen, ByGroup):
            taken = first(chosen.kernels, request, group)
            assert taken is not None
            earlier = chosen.kernels[: chosen.kernels.index(taken)]
            refused += [(x, x.refuses(request, group)) for x in earlier]
            kernel = taken
        share = 1.0
        if kernel.name not in ("dense", "at once", "head by head"):
            share = tiles_python.plan_of(group, length, keys, 0).share(keys)
        of_groups.append(OfHeads(group.heads, kernel.name, share))
    if isinstance(chosen, ByGroup):
        chosen = first(chosen.kernels, request, groups[0]) or chosen
    reasons = dict.fromkeys((x.name, reason) for x, reason in refused if reason is not None)
    return Explanation(
        name,
        chosen.name,
        tuple(of_groups),
        (length, keys),
        tuple(reasons),
        tuple(_ways(request, chosen.name)),
    )


def _ways(request: Request, chosen: str) -> Iterator[str]:
    """What would change the choice, in sentences."""
    if request.rule is None:
        return
    lengths = request.query.shape[1], request.key.shape[1]
    if chosen == "by length":
        yield (
            "The lengths decide when the graph runs. Give `keras.Input` its length, and they are "
            "known before."
        )
    if request.rule.inputs:
        yield "The shares are by positions; ids and flags may leave less."
    if chosen == "dense" and request.tiled is None and all(isinstance(n, int) for n in lengths):
        yield "`tiled=True` skips what is hidden, whatever the size."
    if chosen != "dense" and request.tiled is None:
        yield "`tiled=False` computes all logits."
    one_dnn = cpu.one_dnn()
    if one_dnn is not None:
        yield str(one_dnn)
