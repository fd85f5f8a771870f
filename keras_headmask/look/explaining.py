"""`hm.explain`: which kernel computes attention, where its code is, and how much it computes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from keras import ops

from keras_headmask.attention import gathered, kernels, scopes
from keras_headmask.attention.api import dot_product_attention
from keras_headmask.attention.request import Part, Request, mean_over_heads
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.masks import Tensor
from keras_headmask.rules.base import MaskSpec, enough_heads, whole_number

_SIZE = 8  # of a head, and of what a layer is given: it decides nothing


class Explanation(NamedTuple):
    """The kernel that computes one call of attention, on the backend and device of this process.

    Attributes:
        kernel: A name in the table of kernels in `docs/architecture.md`; "its class" for a layer
            without a rule, which computes as Keras' class does.
        file: Where the code of the kernel is.
        share: The share of all pairs of queries and keys that it computes, by positions; in a loop
            ids and flags may leave less.
    """

    kernel: str = "its class"
    file: str = ""
    share: float = 1.0

    def __str__(self) -> str:
        code = f" ({self.file})" if self.file else ""
        computed = "all logits at once" if self.share == 1 else f"{self.share:.1%} of the pairs"
        return f"{self.kernel}{code}, {computed}"


def explain(
    what: MaskSpec | MaskedAttention,
    queries: int,
    keys: int | None = None,
    batch: int = 1,
    num_heads: int | None = None,
    training: bool = False,
) -> Explanation:
    """Say which kernel computes attention at these sizes, and the share of pairs that it computes.

    Code that is compiled, or whose lengths are not known when it is traced, may choose otherwise:
    `docs/architecture.md` has a table. What a model chooses is logged as it runs, by the logger
    "keras_headmask" at debug level.

    Args:
        what: A rule, or an attention layer of this package.
        queries: Number of queries.
        keys: Number of keys; by default that of the queries.
        batch: Number of examples.
        num_heads: For a rule: number of heads; by default as many as it names, and one more.
        training: For a layer: whether dropout is drawn.

    Returns:
        An `Explanation`, which prints as a line.

    Raises:
        TypeError: for `what` of another kind.
        ValueError: for sizes below 1.

    >>> import keras_headmask as hm
    >>> explain(hm.PerHead({0: hm.Window(31, 0)}), queries=64, num_heads=4).share  # few: all
    1.0
    """
    if not isinstance(what, (MaskSpec, MaskedAttention)):
        raise TypeError(
            "`what` must be a rule, or an attention layer of this package. Of a model, explain the "
            f"rule of a layer, with its `num_heads`. Received: {what!r}."
        )
    keys = queries if keys is None else keys
    if num_heads is None:
        num_heads = enough_heads(what) if isinstance(what, MaskSpec) else 1
    sizes = {"queries": queries, "keys": keys, "batch": batch, "num_heads": num_heads}
    for name, size in sizes.items():
        whole_number(size, name, at_least=1)
    found: list[Explanation] = []

    def watch(request: Request, part: Part) -> Tensor:
        found.append(_explained(request, part))
        return ops.zeros_like(request.query[..., :1]) + request.value[:, :1, :1] * 0

    with kernels.watched(watch), scopes.without_gradients():
        if isinstance(what, MaskSpec):
            query, key = (ops.zeros((batch, n, num_heads, _SIZE)) for n in (queries, keys))
            given = _inputs(what, batch, queries, keys)
            dot_product_attention(query, key, key, mask_spec=what, mask_inputs=given)
        else:
            layer = type(what).from_config(what.get_config())
            query, key = (ops.zeros((batch, n, _SIZE)) for n in (queries, keys))
            given = _inputs(what.mask_spec, batch, queries, keys)
            layer(query, key, mask_inputs=given, training=training)
    return found[0] if found else Explanation()


def _inputs(spec: MaskSpec | None, batch: int, *lengths: int) -> Mapping[str, Any] | None:
    """Zeros for what `spec` reads."""
    tensors: dict[str, Any] = {}
    for name, kind in ({} if spec is None else spec.inputs).items():
        sides = tuple(ops.zeros((batch, n), kind.dtype) for n in lengths)
        tensors[name] = ops.zeros((batch, 1, *lengths), "bool") if kind.rank is None else sides
    return tensors or None


def _explained(request: Request, part: Part) -> Explanation:
    kernel, share = kernels.choose(request, part), 1.0
    batch, queries, heads, _ = request.query.shape
    sizes = queries, request.key.shape[1], 0
    if kernel is kernels.loop:
        from keras_headmask.attention.tensorflow.by_size import Limits

        if not Limits.of(part).hold_of(heads, batch, *sizes[:2]):
            share = mean_over_heads(part, lambda x: gathered.plan_of(x, *sizes).share)
    elif kernel is kernels.gathered:
        share = mean_over_heads(part, lambda x: gathered.plan_of(x, *sizes).share)
    return Explanation(kernel.__name__, kernels.FILES[kernel], share)
