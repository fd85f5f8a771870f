"""`hm.explain`: which kernel computes attention, which refused and why, how much it computes."""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras
from keras import KerasTensor, ops

from keras_headmask import _keras
from keras_headmask.attention import choose, head_groups, observers
from keras_headmask.attention.api import dot_product_attention
from keras_headmask.attention.device import assuming
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.kernels import (
    ByGroup,
    Kernel,
    Loop,
    first,
    impossible,
    kernels_for,
    without_choice,
)
from keras_headmask.attention.request import Request
from keras_headmask.attention.tuning import holding
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.look.tables import Printed, Table, layer_rows
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.adapters import adapted
from keras_headmask.retrofit.rule import spec_of
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.words import enough_heads, heads_in_words, listed

_LENGTH = 1024  # by which shares are counted where lengths are not known
_SIZE = 8  # of what a layer is given: it decides nothing
_COMPILERS = {"tensorflow": "XLA", "jax": "jax.jit", "torch": "torch.compile"}
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class OfHeads:
    """Heads that are computed together, by which kernel, and the share of all pairs it meets.

    The share is by what positions show, in tiles and blocks; ids and flags may leave less. It is 1
    where all logits are computed.
    """

    heads: tuple[int, ...]
    kernel: str
    share: float

    def __str__(self) -> str:
        return f"{heads_in_words(self.heads)}, {self.kernel}: {self.share:.1%}"


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """The kernel that computes one call of attention, and the reasons. It prints in lines.

    Args:
        name: The path of the layer, or the rule.
        kernel: Its name, as in the table of kernels in `docs/architecture.md`; "by head group" if
            they have several. Without a rule to skip anything by: "Keras' own attention", "a fused
            kernel of Keras" or "code of its class".
        groups: The heads that are computed together.
        lengths: Of the queries and keys, by which the shares are counted.
        refused: The kernels that were asked before, and why each refused.
        ways: What would change the choice.
        compiled: The kernels in code that XLA, `jax.jit` or `torch.compile` compiles, for
            inference.
        step: Of a model that generates text: what a step of `generate()` computes.
    """

    name: str
    kernel: str
    groups: tuple[OfHeads, ...]
    lengths: tuple[int, int]
    refused: tuple[tuple[str, str], ...]
    ways: tuple[str, ...]
    compiled: str = ""
    step: str = ""

    def _parts(self) -> Iterator[str | Table]:
        queries, keys = self.lengths
        of_heads = [f"{group} of {queries} x {keys} pairs" for group in self.groups]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused:
            by_reason.setdefault(reason, []).append(name)
        refused = [f"not {listed(names, 'or')}: {why}" for why, names in by_reason.items()]
        yield f"{self.name}: {self.kernel}"
        yield from (f"  {line}" for line in (*of_heads, *refused, *self.ways, *_elsewhere([self])))


class Explanations(Printed, tuple[Explanation, ...]):
    """The attention layers of a model, in a table. Printed alone, one of them says more."""

    def _parts(self) -> Iterator[str | Table]:
        if not self:
            yield "No attention layer that a rule reaches."
        groups = [[(f"{group}",) for group in x.groups] or [(x.kernel,)] for x in self]
        yield Table(layer_rows([x.name for x in self], groups))
        yield from dict.fromkeys(way for x in self for way in x.ways)
        yield from _elsewhere(self)


def _elsewhere(explanations: Sequence[Explanation]) -> Iterator[str]:
    """The kernels in compiled code, and in a step of `generate()`."""
    if compiled := list(dict.fromkeys(x.compiled for x in explanations if x.compiled)):
        names = listed(compiled, "and")
        yield f"Compiled by {_COMPILERS[keras.backend.backend()]}: {names}."
    yield from dict.fromkeys(f"A step of `generate()`: {x.step}." for x in explanations if x.step)


def explain(
    what: Any,
    queries: int | None = None,
    keys: int | None = None,
    batch: int | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
    query_offset: int | None = None,
    padding: bool | None = None,
    training: bool | None = None,
    tiled: bool | None = None,
    device: str | None = None,
) -> Any:
    """Say which code computes attention under a rule, which code refused and why.

    It is the code of plain calls and of TensorFlow's graphs; `compiled` of the result says what
    computes code that XLA or `torch.compile` compiles, and `step` what a step of `generate()` does.
    On TensorFlow everything is traced and nothing computed; on JAX and PyTorch a model runs once,
    on zeros, and nothing of that stays.

    Args:
        what: A rule, an attention layer of this package, or a functional or Sequential model.
        queries: Number of queries; of a model, what stands for each size that its inputs leave
            open. `None`: not known when the graph is traced (TensorFlow alone).
        keys: For a rule or a layer: number of keys; by default that of the queries.
        batch: Number of examples; `None`: not known (1 on JAX and PyTorch).
        num_heads: For a rule: number of heads; by default as many as it names, and one more.
        head_dim: For a rule: size of a head; 64 by default.
        query_offset: For a rule or a layer: position of the first query; 0 by default.
        padding: For a layer: whether its query has a mask of padding.
        training: For a layer or a model: whether dropout is drawn.
        tiled: For a rule: as in `hm.dot_product_attention`. A layer has its own.
        device: "gpu" (NVIDIA's) or "cpu"; by default the one at hand. Operands of a rule have the
            compute dtype of `keras.config.dtype_policy()`: on a GPU half precision has engines that
            float32 has not.

    Returns:
        An `Explanation` of a rule or a layer; a tuple of them, which prints, for a model: of the
        first call of each layer.

    Raises:
        TypeError: for `what` of another kind, or an argument that is for another kind.
        ValueError: for lengths that are not known on JAX or PyTorch, a model without inputs, a
            number below 1, or another device.

    >>> import keras_headmask as hm
    >>> found = explain(hm.PerHead({0: hm.Window(31, 0)}), queries=64, num_heads=4)
    >>> found.groups[0].share  # few logits: all are computed
    1.0
    """
    arguments = {k: v for k, v in locals().items() if k != "what" and v is not None}
    kinds = {"A rule": MaskSpec, "A model": keras.Model, "A layer": MaskedAttention}
    kind = next((name for name, cls in kinds.items() if isinstance(what, cls)), None)
    if kind is None:
        raise TypeError(
            "`what` must be a rule, an attention layer of this package, or a model. (A layer of "
            "Keras that `apply_head_masks` gave a rule is explained with its model.) Received: "
            f"{what!r}."
        )
    if device not in (None, "cpu", "gpu"):
        raise ValueError(f'`device` must be "cpu" or "gpu". Received: {device!r}.')
    arguments.pop("device", None)
    by_kind: dict[str, Callable] = {"A rule": _rule, "A layer": _layer, "A model": _model}
    function = by_kind[kind]
    if unknown := sorted(arguments.keys() - inspect.signature(function).parameters.keys()):
        raise TypeError(f"{kind} has no {unknown[0]!r} of its own to set here. Leave it out.")
    for name in ("queries", "keys", "batch", "num_heads", "head_dim"):
        if name in arguments:
            whole_number(arguments[name], name, at_least=1)
    if keras.backend.backend() != "tensorflow":
        arguments.setdefault("batch", 1)
        if queries is None and not (kind == "A model" and _is_known(what)):
            raise ValueError(
                f"On {keras.backend.backend()} lengths are known when code runs: pass `queries=`, "
                f"for example hm.explain(..., queries={_LENGTH})."
            )
    with holding(_device, device):
        return function(what, **arguments)


_device: ContextVar[str | None] = ContextVar("device", default=None)  # that is asked about


def _inputs(
    spec: MaskSpec | None, batch: Any, queries: Any, keys: Any, query_offset: int
) -> dict[str, Any]:
    """The tensors that `spec` reads."""
    if query_offset:  # a step: ids of the keys' length serve its queries
        queries = keys
    tensors: dict[str, Any] = {}
    for name, kind in ({} if spec is None else spec.inputs).items():
        if kind.rank is None:
            tensors[name] = KerasTensor((batch, 1, queries, keys), "bool")
        else:
            tensors[name] = KerasTensor((batch, keys), kind.dtype)
            if queries != keys:
                tensors[name] = KerasTensor((batch, queries), kind.dtype), tensors[name]
    return tensors


def _rule(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    batch: int | None = None,
    num_heads: int | None = None,
    head_dim: int = 64,
    query_offset: int = 0,
    tiled: bool | None = None,
) -> Explanation:
    keys = queries if keys is None else keys
    heads = enough_heads(spec) if num_heads is None else num_heads
    dtype = keras.config.dtype_policy().compute_dtype
    query, key = (
        KerasTensor((batch, length, heads, head_dim), dtype) for length in (queries, keys)
    )
    inputs = _inputs(spec, batch, queries, keys, query_offset)
    tensors = {"query": query, "key": key, "inputs": inputs}

    def call(query: Tensor, key: Tensor, inputs: Any) -> Tensor:
        more: dict[str, Any] = {"tiled": tiled, "query_offset": query_offset}
        return dot_product_attention(query, key, key, None, spec, inputs or None, **more)

    return _explanations(call, tensors, queries, {None: repr(spec)}, may_force=True)[0]


def _layer(
    layer: Any,
    queries: int | None = None,
    keys: int | None = None,
    batch: int | None = None,
    query_offset: int = 0,
    padding: bool = False,
    training: bool = False,
) -> Explanation:
    keys = queries if keys is None else keys
    copy = type(layer).from_config(layer.get_config())
    query, value = (KerasTensor((batch, length, _SIZE)) for length in (queries, keys))
    copy.build(query.shape, value.shape)
    inputs = _inputs(copy.mask_spec, batch, queries, keys, query_offset)
    given = {"query": query, "inputs": inputs}
    if queries != keys:
        given["value"] = value
    if padding:
        given["query_mask"] = KerasTensor((batch, queries), "bool")

    def call(inputs: Any, **tensors: Tensor) -> Tensor:
        more = {"mask_inputs": inputs or None, "training": training}
        return copy(**tensors, **more, query_offset=query_offset)

    return _explanations(call, given, queries, {None: layer.name}, may_force=True)[0]


def _is_known(model: keras.Model) -> bool:
    """Whether a model has inputs, and all their sizes are known but the batch."""
    inputs = getattr(model, "inputs", None) or ()
    return bool(inputs) and all(None not in x.shape[1:] for x in inputs)


def _model(
    model: keras.Model,
    queries: int | None = None,
    batch: int | None = None,
    training: bool = False,
) -> Explanations:
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            "`hm.explain` needs the inputs of a model: a functional one, or a Sequential one that "
            f"is built. Received: {model!r}. Explain its attention layers one by one."
        )
    tensors = [
        KerasTensor((batch, *(queries if n is None else n for n in x.shape[1:])), x.dtype)
        for x in inputs
    ]
    given = {"inputs": keras.tree.pack_sequence_as(model.input, tensors)}
    layers = {entry.layer: entry.path for entry in Survey(model).known}

    def call(inputs: Any) -> Any:
        return model(inputs, training=training)

    explanations = _explanations(call, given, queries, layers, may_force=False)
    step = _step_of(model)
    return Explanations(dataclasses.replace(x, step=step) for x in explanations)


def _step_of(model: keras.Model) -> str:
    """The kernel of a step of `generate()`; nothing for a model that generates no text."""
    has_one = hasattr(model, "generate_step")
    return "one query against KerasHub's cache of all keys" if has_one else ""


# --- Requests, and what computes them ------------------------------------------------------------


def _explanations(
    call: Callable,
    given: dict[str, Any],
    queries: int | None,
    names: dict[Any, str],
    may_force: bool,
) -> list[Explanation]:
    """Of each attention in `call(**given)`; `names` has the layers to look at, or `None`.

    `may_force`: whether it has an argument `tiled`.
    """
    running: list[Any] = [None]
    found: dict[Any, Explanation] = {}
    by_operation: set[Any] = set()  # layers that call Keras' `dot_product_attention`

    def watch(request: Request, part: Part) -> Tensor | None:
        layer = running[-1]
        if layer in names and layer not in found:
            with assuming(_device.get()):
                found[layer] = _explained(names[layer], request, part, queries, may_force)
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
        stack.enter_context(observers.operations_seen(lambda: by_operation.add(running[-1])))
        _run(call, given)
    return [
        found[layer] if layer in found else _by_its_class(name, layer, layer in by_operation)
        for layer, name in names.items()
    ]


def _by_its_class(name: str, layer: Any, by_operation: bool) -> Explanation:
    """Of a layer that no kernel computes: it has no rule, a flash kernel, or code of its own."""
    kernel = "code of its class"
    if _keras.flash(layer) or (by_operation and keras.backend.backend() == "torch"):
        kernel = "a fused kernel of Keras"
    elif by_operation or not adapted(layer).has_own_code:
        kernel = "Keras' own attention"
    way = "Nothing restricts it, so all logits are computed."
    if spec_of(layer) is not None:
        way = "It gets the rule as a whole mask, so all logits are computed."
    return Explanation(name, kernel, (), (0, 0), (), (way,))


def _run(call: Callable, given: dict[str, Any]) -> None:
    """Run `call` on zeros of those shapes; on TensorFlow trace it, which computes nothing."""
    with keras.StatelessScope():  # no statistics, seeds and losses of a model change
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            specs = keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), given)
            tf.function(lambda given: call(**given), autograph=False).get_concrete_function(specs)
            return
        with observers.without_gradients():
            call(**keras.tree.map_structure(lambda x: ops.zeros(x.shape, x.dtype), given))


def _explained(
    name: str, request: Request, part: Part, queries: int | None, may_force: bool
) -> Explanation:
    chosen, of_groups, refused = _chosen(request, part)
    sizes = request.query.shape[1], request.key.shape[1]
    length, keys = (n if isinstance(n, int) else queries or _LENGTH for n in sizes)
    offset = request.query_offset if isinstance(request.query_offset, int) else 0
    few = _are_few(request, part) if isinstance(chosen, Loop) else False
    groups = [
        OfHeads(x.heads, kernel.name, 1.0 if few else kernel.share(x, length, keys, offset))
        for x, kernel in of_groups
    ]
    is_one = len({group.kernel for group in groups}) == 1
    return Explanation(
        name,
        groups[0].kernel if is_one else chosen.name,
        tuple(groups),
        (length, keys),
        refused,
        tuple(_ways(request, part, chosen, few, length, may_force)),
        _when_compiled(request),
    )


def _chosen(request: Request, part: Part) -> tuple[Kernel, list[tuple[Part, Kernel]], tuple]:
    """The kernel, that of each head group, and which refused before them and why."""
    kernels = kernels_for(request)
    chosen = choose.choose(request, part)
    refused = [(x.name, x.refuses(request, part)) for x in kernels[: kernels.index(chosen)]]
    of_groups: list[tuple[Part, Kernel]] = []
    for group in head_groups.by_rule(part):
        kernel = chosen
        if isinstance(chosen, ByGroup):
            kernel = first(chosen.kernels, request, group) or chosen
            for other in chosen.kernels[: chosen.kernels.index(kernel)]:
                why = f"{other.refuses(request, group)} ({heads_in_words(group.heads).lower()})"
                refused.append((other.name, why))
        of_groups.append((group, kernel))
    reasons = dict.fromkeys((name, reason) for name, reason in refused if reason is not None)
    return chosen, of_groups, tuple(reasons)


def _are_few(request: Request, part: Part) -> bool | None:
    """Whether `Loop` computes all logits; `None` where the run decides."""
    from keras_headmask.attention.tensorflow.by_size import Limits

    batch, queries, heads, _ = request.query.shape
    return Limits.of(part).hold_of(heads, batch, queries, request.key.shape[1])


def _when_compiled(request: Request) -> str:
    """The names of the kernels where the backend's compiler compiles `request`, for inference."""
    kernels = []

    def look() -> None:
        try:
            _, of_groups, _ = _chosen(request, choose.part_of_all(request))
            names = dict.fromkeys(kernel.name for _, kernel in of_groups)
            kernels.append(listed(list(names), "and"))
        except ValueError as reason:
            kernels.append(f"an error, {reason}".rstrip("."))

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def traced() -> Tensor:
            look()
            return tf.zeros([])

        tf.function(traced, jit_compile=True, autograph=False).get_concrete_function()
    else:
        with _as_if_compiled():
            look()
    return kernels[0]


@contextlib.contextmanager
def _as_if_compiled() -> Iterator[None]:
    """Let PyTorch say in this thread that it compiles."""
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    with _LOCK:
        usual, here = torch.compiler.is_compiling, threading.get_ident()
        torch.compiler.is_compiling = lambda: threading.get_ident() == here or usual()
        try:
            yield
        finally:
            torch.compiler.is_compiling = usual


def _ways(
    request: Request, part: Part, chosen: Kernel, few: bool | None, length: int, may_force: bool
) -> Iterator[str]:
    """What would change the choice, in sentences; `few` as of `_are_few`."""
    if request.rule is None:
        return
    if few is not False:
        from keras_headmask.attention.tensorflow.by_size import Limits

        limits = Limits.of(part)
        short = f"sequences of at most {limits.short:,} pairs,"
        at_most = f"a batch of at most {limits.logits:,} logits, or {limits.of_short:,} of {short}"
        if few and request.query.shape[0] is None:
            at_most = f"{short} any number of them,"
        yield (
            f"The sizes decide when the graph runs: of {at_most} all are computed. The shares are "
            f"those of tiles, of {length} positions."
            if few is None
            else f"All logits of {at_most} are computed."
        )
    if request.rule.inputs:
        yield "The shares are by positions; ids and flags may leave less."
    is_free = without_choice(request) is None and impossible(request) is None
    if may_force and is_free and not part.rule.constant:
        if few or not (chosen.block or isinstance(chosen, ByGroup)):
            yield "`tiled=True` skips what is hidden, whatever the size."
        elif not request.tiled:
            yield "`tiled=False` computes all logits."
