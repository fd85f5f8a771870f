"""Every private name of Keras, and of the backends, that this package touches, and why.

None is public interface: any release may rename one. `tests/test_keras_internals.py` asserts what
is relied on, or `tests/versions.py` names a law that needs it, so a new Keras fails there first. No
other file may touch such a name, except to override the methods in `OVERRIDDEN`.
"""

import contextlib
import functools
import inspect
import operator
import pkgutil
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras


def find(*places: str) -> Any:
    """What stands under the first of `places`, dotted names, that this version of Keras has.

    Only attributes of objects need no lookup.
    """
    for place in places:
        with contextlib.suppress(ImportError, AttributeError):
            return pkgutil.resolve_name(place)
    raise ImportError(
        f"keras_headmask needs {' or '.join(places)}, which Keras {keras.__version__} lacks. "
        "Install a version of Keras that keras_headmask names in its requirements."
    )


# A tensor's Keras mask: read and passed on, as stock attention does.
get_keras_mask = find("keras.src.backend.common.masking.get_keras_mask")
set_keras_mask = find("keras.src.backend.common.masking.set_keras_mask")
# Whether Keras infers shapes: then tensors have no values.
in_symbolic_scope = find("keras.src.backend.common.symbolic_scope.in_symbolic_scope")
# The class of a model with a graph: no other can keep a rule in its file.
Functional = find("keras.src.models.functional.Functional")


def traces_function() -> bool:
    """Whether a function is being compiled that may run again: by `tf.function`, `jax.jit`, ...

    Those around Keras' inference of shapes do not count: they leave no trace of what runs in it.
    """
    if keras.backend.backend() == "tensorflow":
        return in_function()
    if keras.backend.backend() == "jax":
        from jax._src import core

        # Each trace knows the one around it, and what it traces: Keras infers shapes by this one.
        of_keras = find("keras.src.backend.compute_output_spec").__code__.co_filename
        trace = core.unsafe_get_current_trace()
        while trace is not None and not hasattr(trace, "frame"):  # (`vmap` by itself keeps nothing)
            trace = getattr(trace, "parent_trace", None)
        source = "" if trace is None else trace.frame.debug_info.func_src_info or ""
        return trace is not None and not (source.startswith("wrapped_fn ") and of_keras in source)
    import torch

    return torch.compiler.is_compiling()


def for_shapes_alone() -> bool:
    """Whether Keras infers shapes, and nothing will run again what is computed now."""
    return in_symbolic_scope() and not traces_function()


# --- Attention ------------------------------------------------------------------------------------

# A subclass must use Keras' own name for them, so these stand outside this file, too.
OVERRIDDEN = {
    "_compute_attention": "attention computes by it, in our layer and under a model's rule",
    "_default_save_signature": "TensorFlow would trace a masked model inside another by itself",
}

COMPUTE_ATTENTION, MASKED_SOFTMAX = "_compute_attention", "_masked_softmax"
FLASH = "_flash_attention"  # set to False on a stand-in for a layer whose probabilities are asked
# What a subclass may override to mask or to attend by itself (the last since Keras 3.15).
ATTENTION_HOOKS = tuple(
    name
    for name in f"""
        {COMPUTE_ATTENTION} {MASKED_SOFTMAX} _compute_attention_mask _compute_causal_mask
        _compute_sliding_window_mask""".split()
    if hasattr(keras.layers.MultiHeadAttention, name)
)

# Arguments of attention that older versions of Keras lack: since when, and what to do there.
SINCE = {
    "sliding_window": ("3.15", "or give the layer the rule `Window(size - 1, size - 1)`"),
    "use_gate": ("3.14", "or leave it out"),
}


def stock_arguments(stock: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments` that Keras' class `stock` takes. Raises for one that it does not know."""
    taken = {*inspect.signature(stock).parameters} - {"kwargs"}
    for name, (version, otherwise) in SINCE.items():
        if name not in taken and arguments.get(name):
            raise ValueError(
                f"`{name}` needs Keras {version}, and this is Keras {keras.__version__}; received "
                f"{name}={arguments[name]!r}. Update Keras, {otherwise}."
            )
    return {k: v for k, v in arguments.items() if k in taken}


def is_grouped(layer: Any) -> bool:
    """Whether Keras' grouped-query attention computes in `layer`, and not multi-head attention."""
    return isinstance(layer, keras.layers.GroupQueryAttention)


def flash(layer: Any) -> bool:
    """Whether a flash kernel is asked for: it returns no probabilities, and drops nothing."""
    return bool(getattr(layer, FLASH, False))


def has_own_softmax(layer: Any) -> bool:
    """Whether a subclass computes the softmax itself, so that we must leave it to that."""
    layers = keras.layers
    stock = layers.GroupQueryAttention if is_grouped(layer) else layers.MultiHeadAttention
    return type(layer)._masked_softmax is not stock._masked_softmax


def projections(layer: Any) -> tuple[Any, ...]:
    """The projections of query, key and value, and of the output."""
    return layer._query_dense, layer._key_dense, layer._value_dense, layer._output_dense


def gate(layer: Any) -> Any:
    """The projection of the query that multiplies the context (`use_gate=True`), or `None`."""
    return getattr(layer, "_gate_dense", None)


def sliding_window(layer: Any) -> int | None:
    """How near keys must be, the query itself counted; our layers turn it into a `Window`.

    Keras has it since 3.15.
    """
    return getattr(layer, "sliding_window" if is_grouped(layer) else "_sliding_window", None)


def scale(layer: Any) -> float:
    """By what logits are multiplied; a subclass may have changed it."""
    return layer._inverse_sqrt_head_dim if is_grouped(layer) else layer._inverse_sqrt_key_dim


def wants_scores(layer: Any) -> bool:
    """Whether probabilities are asked for: grouped-query attention says that by an attribute."""
    return layer._return_attention_scores


def want_scores(layer: Any, wanted: bool) -> None:
    layer._return_attention_scores = wanted


def dropout_layer(layer: Any) -> Any:
    """The dropout layer, whose seed every implementation uses."""
    return layer._dropout_layer


def is_seeded(seed: Any) -> bool:
    """Whether an int, or a generator made of one, says what is drawn."""
    return getattr(seed, "_initial_seed", seed) is not None


class DrawnSeed(keras.random.SeedGenerator):
    """A seed that is drawn already, for Keras to take as the next one of a generator.

    Without one PyTorch draws by its own state.
    """

    def __init__(self, seed: Any) -> None:
        self.seed, self._initial_seed = seed, None if seed is None else 0

    def next(self, ordered: bool = True) -> Any:
        return self.seed


# What a subclass of KerasHub's attention may override, to attend differently.
KERAS_HUB_HOOKS = (
    f"call {COMPUTE_ATTENTION} _masked_softmax _use_fused_attention_op _mask_sliding_window "
    "_compute_bidirectional_sliding_mask"
).split()


def is_assisted(task: Any) -> bool:
    """Whether another model of KerasHub's drafts tokens from the keys that `task` keeps."""
    return getattr(task, "_assistant_model", None) is not None


# --- Layers, and graphs of them -------------------------------------------------------------------

# A layer and all tracked layers inside, where attention is found.
layers_of = operator.methodcaller("_flatten_layers")


def calls_of(operation: Any) -> Any:
    """The calls of an operation, as `nodes` gives them, in every graph."""
    return operation._inbound_nodes


def remat_mode(layer: Any) -> Any:
    """The RematScope of when a layer was built; `None` outside of one. No config holds it."""
    return layer._remat_mode


def sublayers(layer: Any) -> Iterable[keras.Layer]:
    """The layers that `layer` itself tracks; of an operation none, of a used-up model none."""
    return vars(layer).get("_layers", ())


def functional_of(model: Any) -> Any:
    """The functional model inside a Sequential, `None` before it is built; else `model`."""
    return model._functional if isinstance(model, keras.Sequential) else model


def nodes(graph: keras.Model) -> Iterator[Any]:
    """The calls in a graph in forward order, each with `operation`, `input_tensors`, `outputs`."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        yield from graph._nodes_by_depth[depth]


def made_by(tensor: Any) -> tuple[Any, list[Any]]:
    """The operation that made a symbolic tensor, and what it read; `None` if nothing made it."""
    operation, index, _ = getattr(tensor, "_keras_history", (None, 0, 0))
    return operation, [] if operation is None else calls_of(operation)[index].input_tensors


def arguments_of(layer: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `layer` and its defaults; empty if they do not fit."""
    try:
        bound = layer._call_signature.bind_partial(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments | kwargs  # (some classes take a cache by `**kwargs` alone)


def argument_names(layer: Any) -> list[str]:
    """The names of the arguments that calls of `layer` take."""
    return list(layer._call_signature.parameters)


def taken_by_inputs(model: keras.Model, arguments: Any) -> list[tuple[Any, Any]]:
    """Pairs (argument, `keras.Input`) of a call of a functional model; empty if they do not fit."""
    inputs = model.input
    if isinstance(arguments, Mapping):
        known = inputs if isinstance(inputs, Mapping) else {x.name: x for x in model.inputs}
        return [(arguments[name], x) for name, x in known.items() if name in arguments]
    flat = keras.tree.flatten(arguments)
    return list(zip(flat, model.inputs, strict=True)) if len(flat) == len(model.inputs) else []


def tensors_by_input(graph: keras.Model, inputs: Any) -> dict[str, Any]:
    """The tensors of a call of a functional model, by the names of its inputs."""
    values = graph._standardize_inputs(inputs)
    return {x.name: value for x, value in zip(graph.inputs, values, strict=True)}


def set_inputs(graph: keras.Model, inputs: Any) -> None:
    """Let a functional model take `inputs`; its layers read those that they read before."""
    vars(graph).update(_inputs_struct=inputs, _inputs=keras.tree.flatten(inputs))


def uncompile(model: keras.Model, source: keras.Model) -> None:
    """Undo `compile`, which KerasHub's tasks call when they are made; the sampler is `source`'s."""
    find("keras.src.models.model.Trainer").__init__(model)
    for name in {"optimizer", "sampler", "generate_function"} & vars(model).keys():
        delattr(model, name)
    sampling = {"sampler": getattr(source, "sampler", None), "generate_function": None}
    vars(model).update({k: x for k, x in sampling.items() if hasattr(source, k)})


def copy_modes(source: Any, target: Any) -> None:
    """Give a copy of a layer what no config holds: its RematScope, and whether it was called.

    (Keras exports no model to ONNX that was not.)
    """
    names = "_remat_mode", "_called"
    vars(target).update({k: x for k, x in vars(source).items() if k in names})


# --- Files ----------------------------------------------------------------------------------------

saving_lib = find("keras.src.saving.saving_lib")
KerasSaveable = find("keras.src.saving.keras_saveable.KerasSaveable")
GLOBAL_CUSTOM_NAMES = find("keras.src.saving.object_registration.GLOBAL_CUSTOM_NAMES")
REGISTERED_OBJS_TO_NAMES = find("keras.src.api_export.REGISTERED_OBJS_TO_NAMES")
global_state = find("keras.src.backend.common.global_state")


def file_under(cls: type, name: str) -> None:
    """Save objects of `cls` under `name`, without registering the class for that name."""
    GLOBAL_CUSTOM_NAMES[cls] = name


def file_as(cls: type, stock: type) -> None:
    """Save objects of `cls` as those of `stock`."""
    for names in (GLOBAL_CUSTOM_NAMES, REGISTERED_OBJS_TO_NAMES):
        if stock in names:
            names[cls] = names[stock]


def in_hdf5() -> bool:
    """Whether a whole model is being saved in HDF5, whose reader finds classes by name alone."""
    return bool(global_state.get_global_attribute("use_legacy_config", False))


def file_weights_under(name: str, other: str) -> None:
    """File weights of the class called `name` as those of `other`: a layer has no say in that."""

    def to_snake_case(class_name: str) -> str:
        return usual(other if class_name == name else class_name)

    usual = saving_lib.naming.to_snake_case
    names = vars(saving_lib.naming) | {"to_snake_case": to_snake_case}
    saving_lib.naming = types.SimpleNamespace(**names)


def has_query_in_file(layer: Any, store: Any) -> bool:
    """Whether the file that an attention layer is read from has weights to project its query."""
    part = "_query_dense" if is_grouped(layer) else "query_dense"
    path = f"{getattr(store, '_h5_entry_path', None) or ''}/{part}"
    if path.startswith("/"):
        return False  # not from a file
    return store.has_path(path) if hasattr(store, "has_path") else path in store.h5_file  # < 3.15


def layers_in_file(layer: Any) -> dict[str, keras.Layer]:
    """The layer (key "") and all layers inside, by their places among attributes, parents first.

    These do not change when a layer is made later or gets another name. As files do, this reaches
    what Keras does not track, as the preprocessor of KerasHub's tasks on PyTorch.
    """
    layers: dict[str, keras.Layer] = {}
    seen: dict[int, Any] = {}  # by id; they are kept, so that no id is used again

    def look(part: Any, path: str) -> None:
        if not isinstance(part, (KerasSaveable, list, tuple, dict)) or id(part) in seen:
            return
        seen[id(part)] = part
        if isinstance(part, keras.Layer):
            layers[path] = part
        if isinstance(part, KerasSaveable):
            inside = saving_lib._walk_saveable(part)
        else:
            inside = part.items() if isinstance(part, dict) else enumerate(part)
        for name, inner in inside:
            look(inner, f"{path}/{name}" if path else name)

    look(layer, "")
    return layers


# What pickle calls to make a model of the bytes of its file; our classes have no name to find.
unpickle_model = Functional._unpickle_model


# --- Functions of Keras that are replaced, each when the first object needs it --------------------


# What `clone_model` calls, with the caller's function for layers.
CLONES = "_clone_functional_model", "_clone_sequential_model"


def run_in_scopes(place: str, scopes: Mapping[str, Callable]) -> None:
    """Let functions of a Keras module that take a model, by name, run in scopes made of it.

    Keras looks up by name those that export a model or clone it, and says nowhere what for.
    """

    def run(scope: Callable, usual: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(model):
            return usual(model, *args, **kwargs)

    module = find(place)
    for name, scope in scopes.items():
        usual = getattr(module, name)
        setattr(module, name, functools.wraps(usual)(functools.partial(run, scope, usual)))


# --- TensorFlow -----------------------------------------------------------------------------------

# Attributes of a function in a graph: stays one function; XLA compiles it.
NOT_INLINED = {"_noinline": True}
XLA_MUST_COMPILE = "_XlaMustCompile"


def exempt_from_autograph(package: str) -> None:
    """Let AutoGraph leave the functions of `package` as they are written, as it leaves Keras' own.

    In a user's `tf.function` it would rewrite 200 of them before the first call, for seconds; and
    `do_not_convert` would have to stand at each public function and at each layer's `call`.
    """
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert(package), *config.CONVERSION_RULES)


if keras.backend.backend() == "tensorflow":
    exempt_from_autograph("keras_headmask")


def custom_gradient(function: Callable) -> Callable:
    """`tf.custom_gradient` for a `function` of tensors, whose graph can be freed.

    `function` returns a tensor, and a function that gives the gradients of the operands. In a graph
    TensorFlow registers that one under a name for good: it holds the graph, and that the variables.
    Here the operation holds it, as the call of a `tf.function` holds its gradient.
    """

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        import tensorflow as tf

        if tf.executing_eagerly():
            return tf.custom_gradient(function)(*operands)
        operands = tuple(map(tf.convert_to_tensor, operands))
        result, gradient = function(*operands)
        rest = lambda upstream, *_: [None, *gradient(upstream)]  # noqa: E731
        return _with_gradient(function.__name__, [result, *operands], rest)[0]

    return call


def _with_gradient(name: str, tensors: list[Any], gradients: Callable) -> list[Any]:
    """`tensors`, whose gradients are `gradients(*upstream)`."""
    import tensorflow as tf
    from tensorflow.python.eager import record

    graph = tf.compat.v1.get_default_graph()
    of_operation = {"IdentityN": lambda _, *upstream: gradients(*upstream)}
    # (A `ForwardAccumulator` would ask for the gradient within, where another may not be held.)
    with unrecorded(), graph._override_gradient_function(of_operation):
        identities = tf.identity_n(tensors)
    record.record_operation(name, identities, tensors, gradients)  # for a `GradientTape`
    return identities


def for_branches(condition: Any, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """`tensors` for each of two branches, of which the second runs where `condition` is false.

    Their gradient is what that branch gives: TensorFlow would add the zeros of the other.
    """
    import tensorflow as tf

    count = len(tensors)

    def gradients(*upstream: Any) -> list[Any]:
        first, second = upstream[:count], upstream[count : 2 * count]
        return [*tf.cond(condition, lambda: first, lambda: second), *[None] * count]

    copies = _with_gradient("for_branches", [*tensors, *tensors], gradients)
    return copies[:count], copies[count:]


def unrecorded() -> AbstractContextManager[None]:
    """A context without derivatives, for any tape or `ForwardAccumulator`."""
    from tensorflow.python.eager import record

    return record.stop_recording()


def in_forward_mode(*tensors: Any) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of `tensors`.

    It raises for a `tf.cond` in a branch of another.
    """
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def in_vectorized_map() -> bool:
    """Whether `tf.vectorized_map` traces, or a function inside: it has no gradient of `tf.cond`."""
    import tensorflow as tf

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if re.search(r"(^|/)loop_body(_\d+)?(/|$)", graph.get_name_scope()):  # the second: `_1`
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def outermost_graph() -> Any:
    """The graph of the function that is traced, whatever function, loop or branch it is now in."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        graph = outer
    return graph


def in_xla() -> bool:
    """Whether XLA compiles what TensorFlow traces now: it cuts no slice of unknown length."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def checks_numerics() -> bool:
    """Whether TensorFlow raises for inf and NaN: `tf.debugging.enable_check_numerics`."""
    from tensorflow.python.debug.lib import check_numerics_callback as checks

    return getattr(checks._state, "check_numerics_callback", None) is not None


def are_as_long(one: Any, other: Any) -> bool:
    """Whether two tensors of a graph have one batch and one length, as made of one tensor.

    So are the projections of one sequence: no operation between changes its first two axes.
    """

    def source(tensor: Any) -> Any:
        if hasattr(tensor, "numpy"):  # of no graph
            return tensor
        while (operation := tensor.op).inputs:
            first, *others = operation.inputs
            keeps = operation.type in ("Identity", "Cast", "BiasAdd")
            if operation.type == "Einsum":
                letters = operation.get_attr("equation").decode().replace("->", ",").split(",")
                keeps = "." not in letters[0] and letters[0][:2] == letters[-1][:2]
            elif operation.type in ("AddV2", "Mul", "Sub"):
                ranks = [x.shape.rank for x in (first, *others)]
                keeps = None not in ranks and ranks[1] <= ranks[0] - 2
            if not keeps:
                break
            tensor = first
        return operation.outputs[tensor.value_index]

    return source(one) is source(other)


def in_function(inside: Any = None) -> bool:
    """Whether a `tf.function` is traced now, inside of the graph `inside` if that is given.

    Those around Keras' inference of shapes do not count, nor do loops and branches: their graphs
    have classes of their own.
    """
    import tensorflow as tf

    found, graph = False, None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph not in (None, inside):
        if getattr(graph, "name", "").startswith("scratch_graph"):  # Keras infers shapes
            break
        found = found or type(graph).__name__ == "FuncGraph"
        graph = getattr(graph, "outer_graph", None)
    return found and (inside is None or graph is not None)


def without_number(name: str) -> str:
    """The name of a layer or a scope as it was before it got a number, since another had it."""
    return re.sub(r"_\d+$", "", name)


def scopes_in_traces(holder: Any) -> set[str]:
    """The scopes, as of layers, in what `tf.function`s among the attributes of an object traced."""
    import tensorflow as tf

    kind = tf.types.experimental.PolymorphicFunction
    attributes = [x for place in (holder, *type(holder).__mro__) for x in vars(place).items()]
    functions = [getattr(holder, name) for name, value in attributes if isinstance(value, kind)]
    # (A subclass may override one by what is none.)
    of_all = [x._list_all_concrete_functions() for x in functions if isinstance(x, kind)]
    operations = [op for traces in of_all for x in traces for op in x.graph.get_operations()]
    return {without_number(scope) for op in operations for scope in op.name.split("/")[:-1]}
