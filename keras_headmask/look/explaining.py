"""`hm.explain`: which kernel computes attention, where its code is, and how much it computes."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_headmask.attention import choose, gathered, head_groups, kernels, observers, planner
from keras_headmask.attention.api import dot_product_attention
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.request import Request
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.words import enough_heads

_SIZE = 8  # of a head, and of what a layer is given: it decides nothing


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernel that computes one call of attention, on the backend and device of this process.

    Args:
        name: The path of the layer, or the rule.
        kernel: A name in the table of kernels in `docs/architecture.md`; "its class" where no
            kernel is asked: no rule reaches the layer, or its class has attention of its own.
        file: Where the code of the kernel is.
        share: The share of all pairs of queries and keys that it computes, by positions; in a loop
            ids and flags may leave less.
    """

    name: str
    kernel: str = "its class"
    file: str = ""
    share: float = 1.0

    def __str__(self) -> str:
        code = f" ({self.file})" if self.file else ""
        computed = "all logits at once" if self.share == 1 else f"{self.share:.1%} of the pairs"
        return f"{self.name}: {self.kernel}{code}, {computed}"

    __repr__ = __str__


def explain(
    what: Any,
    queries: int | None = None,
    keys: int | None = None,
    batch: int = 1,
    num_heads: int | None = None,
    training: bool = False,
) -> Any:
    """Say which kernel computes attention at these sizes, and the share of pairs that it computes.

    It runs once, on zeros; nothing of that stays. Code that is compiled, or whose lengths are not
    known when it is traced, may choose otherwise: `docs/architecture.md` has a table.

    Args:
        what: A rule, an attention layer of this package, or a functional or Sequential model.
        queries: Number of queries; of a model, what stands for each size that its inputs leave
            open.
        keys: For a rule or a layer: number of keys; by default that of the queries.
        batch: Number of examples.
        num_heads: For a rule: number of heads; by default as many as it names, and one more.
        training: For a layer or a model: whether dropout is drawn.

    Returns:
        An `Explanation`; for a model a list, one of the first call of each attention layer.

    Raises:
        TypeError: for `what` of another kind.
        ValueError: for sizes that are missing or below 1, or a model without inputs.

    >>> import keras_headmask as hm
    >>> explain(hm.PerHead({0: hm.Window(31, 0)}), queries=64, num_heads=4).share  # few: all
    1.0
    """
    if not isinstance(what, (MaskSpec, MaskedAttention, keras.Model)):
        raise TypeError(
            "`what` must be a rule, an attention layer of this package, or a model. (A layer of "
            "Keras that `apply_head_masks` gave a rule is explained with its model.) Received: "
            f"{what!r}."
        )
    inputs = getattr(what, "inputs", None) if isinstance(what, keras.Model) else [None]
    if not inputs:
        raise ValueError(
            "`hm.explain` needs the inputs of a model: a functional one, or a Sequential one that "
            f"is built. Received: {what!r}. Explain its attention layers one by one."
        )
    shapes = [(None, None) if x is None else x.shape for x in inputs]
    sizes = {"queries": queries, "keys": keys, "batch": batch, "num_heads": num_heads}
    for name, size in sizes.items():
        if size is not None or (name == "queries" and any(None in x[1:] for x in shapes)):
            whole_number(size, name, at_least=1)
    keys = keys or queries
    if isinstance(what, MaskSpec):
        heads = num_heads or enough_heads(what)
        query, key = (ops.zeros((batch, n, heads, _SIZE)) for n in (queries, keys))
        given = _inputs(what, batch, queries, keys)
        names = {None: str(what)}
        call = lambda: dot_product_attention(query, key, key, None, what, given)  # noqa: E731
    elif isinstance(what, MaskedAttention):
        layer = type(what).from_config(what.get_config())
        query, key = (ops.zeros((batch, n, _SIZE)) for n in (queries, keys))
        given = _inputs(layer.mask_spec, batch, queries, keys)
        names = {None: what.name}
        call = lambda: layer(query, key, mask_inputs=given, training=training)  # noqa: E731
    else:
        free = [(batch, *(n or queries for n in shape[1:])) for shape in shapes]
        zeros = [ops.zeros(shape, x.dtype) for shape, x in zip(free, inputs, strict=True)]
        packed = keras.tree.pack_sequence_as(what.input, zeros)
        names = {entry.layer: entry.path for entry in Survey(what).known}
        call = lambda: what(packed, training=training)  # noqa: E731
    found = _found(call, names, queries or 1)
    return found if isinstance(what, keras.Model) else found[0]


def _inputs(spec: MaskSpec | None, batch: int, queries: Any, keys: Any) -> dict[str, Any] | None:
    """Zeros for what `spec` reads."""
    tensors: dict[str, Any] = {}
    for name, kind in ({} if spec is None else spec.inputs).items():
        if kind.rank is None:
            tensors[name] = ops.zeros((batch, 1, queries, keys), "bool")
        else:
            sides = [ops.zeros((batch, n), kind.dtype) for n in (queries, keys)]
            tensors[name] = sides[0] if queries == keys else tuple(sides)
    return tensors or None


def _found(call: Callable, names: dict[Any, str], length: int) -> list[Explanation]:
    """Of each attention in `call()`; `names` has the layers to look at, or `None`."""
    running: list[Any] = [None]
    found: dict[Any, Explanation] = {}

    def watch(request: Request, part: Part) -> Tensor | None:
        layer = running[-1]
        if layer in names and layer not in found:
            found[layer] = _explained(names[layer], request, part, length)
        if None not in names or request.wants_probabilities:
            return None  # a function inside of a model would keep what is traced now
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
                stack.enter_context(observers.overriding(layer, "call", entered(layer)))
        stack.enter_context(choose.watched(watch))
        stack.enter_context(keras.StatelessScope())  # no statistics, seeds and losses change
        stack.enter_context(observers.without_gradients())
        call()
    return [found.get(layer, Explanation(name)) for layer, name in names.items()]


def _explained(name: str, request: Request, part: Part, length: int) -> Explanation:
    kernel = choose.choose(request, part)
    (batch, queries, heads, _), share = request.query.shape, 1.0
    # (A function inside of a model may not know its lengths.)
    queries, keys = queries or length, request.key.shape[1] or length
    sizes = queries, keys, 0
    if kernel is kernels.loop:
        from keras_headmask.attention.tensorflow.by_size import Limits

        if not Limits.of(part).hold_of(heads, batch, queries, keys):
            share = head_groups.mean(part, lambda x: planner.plan_of(x, *sizes).share(keys))
    elif kernel is kernels.gathered:
        share = head_groups.mean(part, lambda x: gathered.plan_of(x, *sizes).share)
    return Explanation(name, kernel.__name__, kernels.FILES[kernel], share)
