"""Attention that code or a graph spells out: a softmax, and then a product.

Both are read as steps: one for each operation, with the tensors that it reads and makes. The steps
of a functional model are the nodes of its graph. Those of a layer's own code are the operations
that it runs on symbolic tensors, as the backend shows them: whether the code calls `keras.ops`, a
layer of Keras or the backend itself makes no difference. What runs in a `tf.function`, a loop or a
branch of the backend stays hidden.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras


class Value:
    """A tensor in a step; only its shape is kept."""

    def __init__(self, shape: Any):
        self.shape = tuple(shape)


class Step(NamedTuple):
    """One operation: its kind, or "", and the tensors that depend on the inputs of the code.

    Kinds: "softmax"; "exp", which may be a part of one; "product" of two tensors; "dense", of a
    tensor and weights ("dense softmax" with that activation); "moved", where only axes change;
    "hidden", whose code is not known.
    """

    kind: str
    inputs: list[Any]
    outputs: list[Any]
    operation: Any = None


# fmt: off
_NAMES = {
    "softmax": {"Softmax", "softmax", "LogSoftmax", "log_softmax"},
    "exp": {"Exp", "exp"},
    "product": {
        "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul", "Einsum",  # TensorFlow
        "dot_general",  # JAX
        "matmul", "__matmul__", "bmm", "baddbmm", "mm", "einsum", "tensordot", "linear",  # PyTorch
    },
    "moved": {"Reshape", "Transpose"},
    "hidden": {"PartitionedCall", "StatefulPartitionedCall", "PyFunc", "EagerPyFunc"},
    "of a shape": {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"},
}
# fmt: on
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
_Values = dict[Any, Value]


class Recorder:
    """Runs code, and keeps its steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, function: Callable[..., None], *tensors: Any) -> None:
        """`function(*tensors)`, which are symbolic tensors of the backend."""
        raise NotImplementedError

    def hiding(self) -> AbstractContextManager[Any]:
        """Make what runs inside "hidden"."""
        raise NotImplementedError

    def _add(self, name: str, inputs: Sequence[Value], shapes: Sequence[Any]) -> list[Value]:
        """The outputs of a new step; none if it reads nothing that depends on the inputs."""
        kind = _KINDS.get(name, "")
        if not inputs or kind == "of a shape":
            return []
        kind = "dense" if kind == "product" and len(inputs) == 1 else kind
        outputs = [Value(shape) for shape in shapes]
        self.steps.append(Step(kind, list(inputs), outputs))
        return outputs


class OnTensorFlow(Recorder):
    """Reads the graph that Keras makes to infer shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: set[int] = set()

    def run(self, function: Callable[..., None], *tensors: Any) -> None:
        import tensorflow as tf

        first, scope = len(_operations()), tf.compat.v1.get_variable_scope()
        caching_device = scope.caching_device
        try:
            function(*tensors)
        finally:  # an error inside of `tf.map_fn` leaves one, which eager code refuses
            scope.set_caching_device(caching_device)
        values: _Values = {x.ref(): Value(_shape(x)) for x in tensors if isinstance(x, tf.Tensor)}
        for number, operation in enumerate(_operations()[first:], first):
            name = "PyFunc" if number in self._hidden else operation.type
            inputs = [values[x.ref()] for x in operation.inputs if x.ref() in values]
            outputs = self._add(name, inputs, [_shape(x) for x in operation.outputs])
            values.update(zip((x.ref() for x in operation.outputs), outputs, strict=False))

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        first = len(_operations())
        yield
        self._hidden.update(range(first, len(_operations())))


def _operations() -> list[Any]:
    import tensorflow as tf

    return tf.compat.v1.get_default_graph().get_operations()


def _shape(tensor: Any) -> tuple[Any, ...]:
    return () if tensor.shape.rank is None else tuple(tensor.shape)


_SCOPE = "attention_within_reach"


class OnJAX(Recorder):
    """Reads the jaxpr of the code, and the jaxprs inside it."""

    def run(self, function: Callable[..., None], *tensors: Any) -> None:
        import jax

        def traced_to_be_read(*tensors: Any) -> None:  # (by its name: see `_keras.traces_function`)
            function(*tensors)

        jaxpr = jax.make_jaxpr(traced_to_be_read)(*tensors).jaxpr
        self._read(jaxpr, {x: Value(x.aval.shape) for x in jaxpr.invars})

    def hiding(self) -> AbstractContextManager[Any]:
        import jax

        return jax.named_scope(_SCOPE)

    def _read(self, jaxpr: Any, values: _Values, is_hidden: bool = False) -> None:
        for equation in jaxpr.eqns:
            hidden = is_hidden or _SCOPE in str(equation.source_info.name_stack)
            read = [None if hasattr(x, "val") else values.get(x) for x in equation.invars]
            inputs = [x for x in read if x is not None]
            outputs: list[Any] = []
            inner = list(filter(None, map(_jaxpr_in, equation.params.values())))
            if len(inner) == 1 and len(inner[0].invars) == len(read):
                known = {x: v for x, v in zip(inner[0].invars, read, strict=True) if v is not None}
                self._read(inner[0], known, hidden)
                outputs = [None if hasattr(x, "val") else known.get(x) for x in inner[0].outvars]
            if outputs:
                pairs = zip(equation.outvars, outputs, strict=False)
            else:
                name = "PyFunc" if hidden or inner else equation.primitive.name
                shapes = [x.aval.shape for x in equation.outvars]
                pairs = zip(equation.outvars, self._add(name, inputs, shapes), strict=False)
            values.update({x: value for x, value in pairs if value is not None})


def _jaxpr_in(parameter: Any) -> Any:
    """The code that a parameter of an equation holds, or `None`."""
    jaxpr = getattr(parameter, "jaxpr", parameter)
    return jaxpr if hasattr(jaxpr, "eqns") else None


class OnPyTorch(Recorder):
    """Notes the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self._is_hiding = False

    def run(self, function: Callable[..., None], *tensors: Any) -> None:
        import torch
        from torch.overrides import TorchFunctionMode

        kept = list(tensors)  # kept alive, so that no id is used twice
        values: _Values = {id(x): Value(x.shape) for x in tensors if torch.is_tensor(x)}
        recorder = self

        class Noting(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                read = keras.tree.flatten((args, kwargs or {}))
                inputs = [values[id(x)] for x in read if id(x) in values]
                given = func(*args, **(kwargs or {}))
                outputs = [x for x in keras.tree.flatten(given) if torch.is_tensor(x)]
                if inputs and outputs:
                    name = "PyFunc" if recorder._is_hiding else getattr(func, "__name__", "")
                    made = recorder._add(name, inputs, [x.shape for x in outputs])
                    values.update(zip(map(id, outputs), made, strict=True))
                    kept.extend(outputs)
                return given

        with Noting():
            function(*tensors)

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        before, self._is_hiding = self._is_hiding, True
        try:
            yield
        finally:
            self._is_hiding = before


def recorder() -> Recorder:
    """A new recorder for the backend of Keras."""
    kinds = {"tensorflow": OnTensorFlow, "jax": OnJAX, "torch": OnPyTorch}
    return kinds[keras.backend.backend()]()


def softmaxes_of_attention(graphs: Iterable[Any]) -> Iterator[Any]:
    """The softmax of attention that a graph spells out: of (..., queries, keys), then a product."""
    for graph in graphs:
        nodes = _keras.nodes(graph)
        steps = (Step(_kind(x.operation), x.input_tensors, x.outputs, x.operation) for x in nodes)
        for step in softmaxes_among(steps):
            yield step.operation


def softmaxes_among(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps that are the softmax of attention, in whole or, as an `exp`, in part."""
    steps = list(steps)
    readers: dict[int, list[Step]] = {}
    makers: dict[int, Step] = {}
    for step in steps:
        makers.update((id(tensor), step) for tensor in step.outputs)
        for tensor in step.inputs:
            readers.setdefault(id(tensor), []).append(step)
    for step in steps:
        if (
            step.kind.endswith(
                ("softmax", "exp")
            )  # (the division by the sum may come before or after the product)
            and any(map(_may_be_weights, step.outputs))
            and not _is_of_single_positions(step.outputs[0], makers, step.kind == "exp")
            and _meets_a_product(step, readers)
        ):
            yield step


_PRODUCTS = "Matmul", "Einsum", "Dot", "Tensordot"
_DENSE = "Dense", "EinsumDense"


def _kind(operation: Any) -> str:
    """The kind of step that an operation of a graph is."""
    name = type(operation).__name__
    named = getattr(getattr(operation, "activation", None), "__name__", "")
    if name in _DENSE:
        return "dense softmax" if named == "softmax" else "dense"
    if name in ("Softmax", "LogSoftmax") or named in ("softmax", "log_softmax"):
        return "softmax"
    if name == "Exp":
        return "exp"
    if name in _PRODUCTS:
        return "product"
    is_own = _keras.is_own(operation, "ops", "layers")
    runs_others = isinstance(operation, (keras.layers.Lambda, keras.layers.Wrapper))
    return "" if is_own and not runs_others else "hidden"


def _may_be_weights(tensor: Any) -> bool:
    """Whether it may be probabilities: the last axes are queries and keys, equally long.

    (One row of weights alone pools a sequence.)
    """
    shape = tuple(tensor.shape)
    return len(shape) > 2 and shape[-2] != 1 and (shape[-1] is None or shape[-1] == shape[-2])


def _meets_a_product(softmax: Step, readers: dict[int, list[Step]]) -> bool:
    waiting, seen = list(softmax.outputs), set()
    while waiting:
        for reader in readers.get(id(waiting.pop()), ()):
            if reader.kind == "product":
                return True
            if id(reader) not in seen and any(map(_may_be_weights, reader.outputs)):
                seen.add(id(reader))
                waiting += reader.outputs
    return False


def _is_of_single_positions(tensor: Any, makers: dict[int, Step], is_exp: bool) -> bool:
    """Whether each number is made of one position by a Dense, as in a mixture of experts.

    Logits of attention are made of pairs of positions: by a product, a sum that broadcasts, or code
    that the graph does not show. The `exp` of an input is no softmax, nor is that of a log-softmax,
    which is a step of its own.
    """
    waiting, seen = [tensor], {id(tensor)}
    while waiting:
        tensor = waiting.pop()
        step = makers.get(id(tensor))
        if is_exp and (step is None or not step.inputs or step.kind.endswith("softmax")):
            continue
        if step is None or step.kind in ("product", "hidden"):
            return False
        if step.kind.startswith("dense") and _rank(step.inputs[0], makers) <= 3:
            continue
        inputs = step.inputs
        if len(inputs) > 1:
            inputs = [x for x in inputs if x.shape == tensor.shape]
        if not inputs or any(len(x.shape) > len(tensor.shape) for x in inputs):
            return False  # (a sum over features, say, of products of pairs)
        waiting += [x for x in inputs if id(x) not in seen]
        seen.update(map(id, inputs))
    return True


def _rank(tensor: Any, makers: dict[int, Step]) -> int:
    """The rank of a tensor before axes were merged, as TensorFlow does for a Dense."""
    rank = len(tensor.shape)
    step = makers.get(id(tensor))
    while step is not None and step.kind == "moved":
        rank = max(rank, len(step.inputs[0].shape))
        step = makers.get(id(step.inputs[0]))
    return rank
