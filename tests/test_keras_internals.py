"""What the package relies on inside Keras and its backends, so that a new one fails here first.

Each test names what of `_keras/` it covers, and says what its failure means for users. Names whose
change a law of users sees stand in `versions.SEEN_BY`.
"""

import ast
import functools
import inspect
import pickle
import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from fresh import run_fresh
from keras import ops
from keras_versions import HAS, numbers
from versions import SEEN_BY

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention.tuning import forward_only, is_dense_scope, is_forward_only
from keras_headmask.layers import grouped_query, masked, multi_head
from keras_headmask.retrofit import masked_model, wrap
from keras_headmask.retrofit.adapters import adapter_of

BACKEND = keras.backend.backend()
MHA = keras.layers.MultiHeadAttention
GQA = keras.layers.GroupQueryAttention
each_stock = pytest.mark.parametrize("stock", [MHA, GQA])
X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
COVERED = set()


def relies_on(names, breaks):
    """Cover `names` of `_keras/`; a failure says what it breaks."""

    def mark(test):
        COVERED.update(names.split())

        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except Exception as error:
                what = f"Keras {keras.__version__} on {BACKEND} changed `{names}`"
                raise AssertionError(f"{what}: {breaks}. ({error})") from error

        return run

    return mark


def attention(cls=MHA, **kwargs):
    """Two heads of size 4; those of grouped-query attention share a key head."""
    sizes = (4, 2, 1) if issubclass(cls, GQA) else (2, 4)
    layer = cls(*sizes, name="attention", **kwargs)
    layer.build((2, 5, 8), (2, 5, 8))
    return layer


def graph():
    """x -> first -> relu -> second."""
    x = keras.Input((3,), name="x")
    hidden = keras.layers.Dense(4, name="first")(x)
    return keras.Model(x, keras.layers.Dense(2, name="second")(ops.relu(hidden)))


def hooked(holder, name, seen):
    """Let `holder.name(...)` note its arguments."""
    usual = getattr(holder, name)

    def note(*args, **kwargs):
        seen.append((name, args, kwargs))
        return usual(*args, **kwargs)

    vars(holder)[name] = note
    return holder


def test_every_private_name_is_covered():
    names = set(_keras.OVERRIDDEN)
    files = Path(_keras.__file__).parent.glob("*.py")
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            targets = ast.walk(ast.Tuple(node.targets))
            names |= {n.id for n in targets if isinstance(n, ast.Name)}
    seen = {name for tests in SEEN_BY.values() for of in tests.values() for name in of.split()}
    assert names - {"OVERRIDDEN"} == COVERED | seen
    assert not COVERED & seen
    for file, tests in SEEN_BY.items():
        text = Path(__file__).parent.joinpath(f"{file}.py").read_text(encoding="utf-8")
        assert [test for test in tests if f"def {test}(" not in text] == []


TOO_OLD = """
import sys
import keras
keras.__version__ = sys.argv[1]
try:
    import keras_headmask
except ImportError as error:
    assert str(error) == sys.argv[2], error
else:
    raise AssertionError("imported")
"""


@pytest.mark.long
@pytest.mark.tensorflow  # (the same on each)
@pytest.mark.parametrize("version", ["3.12.4"])
def test_a_keras_that_is_too_old_is_refused_at_import(version):
    asked = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    oldest = re.search('"keras>=([0-9.]+),', asked)[1]
    said = f"keras_headmask needs Keras {oldest} or later, and this is Keras {version}. "
    run_fresh(TOO_OLD, version, f"{said}Update it: pip install --upgrade keras")


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (hm.PerHeadMaskedMultiHeadAttention, MHA),
        (hm.PerHeadMaskedGroupedQueryAttention, GQA),
        (masked.MaskedAttention, MHA),
        (masked.MaskedAttention, GQA),
        *((cls, _keras.Functional) for cls in (wrap.MaskedLayer, masked_model.HeadMasked)),
    ],
)
def test_our_classes_override_nothing_else(ours, stock):
    """Or a method that Keras calls would be ours by accident."""
    private = {n for n in vars(ours) if n.startswith("_") and not n.startswith("__")}
    example = graph() if stock is _keras.Functional else attention(stock)
    # `_restricts` and the like are ours alone.
    assert {n for n in private if hasattr(example, n)} <= set(_keras.OVERRIDDEN)


@each_stock
def test_our_attributes_are_none_of_keras(stock):
    stored = {
        ast.unparse(node).removeprefix("self.")
        for module in (masked, multi_head, grouped_query)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    private = {name for name in stored if name.startswith("_")}
    assert "_mask_spec" in private
    assert not [name for name in private if hasattr(attention(stock), name)]


@relies_on("find", breaks="a name that moved would be missed, or its loss not be said")
def test_a_private_name_is_looked_for_in_each_place():
    places = "keras.src.moved", "keras.src.backend.moved.nn", "keras.src.models.model.Model"
    assert _keras.lookup.find(*places) is keras.Model
    said = (
        r"needs keras\.src\.moved or keras\.src\.backend\.moved\.nn, which Keras "
        rf"{re.escape(keras.__version__)} lacks\. Install a version of Keras that .* names"
    )
    with pytest.raises(ImportError, match=said):
        _keras.lookup.find(*places[:2])


# --- Attention -----------------------------------------------------------------------------------


@relies_on(
    "ATTENTION_HOOKS stock_arguments",
    breaks="a subclass that masks or attends by itself would be passed over",
)
@each_stock
def test_attention_passes_all_hooks(stock):
    window = {"sliding_window": 2} if "sliding_window" in HAS else {}
    layer, seen = attention(stock, **window), []
    for name in _keras.ATTENTION_HOOKS:
        hooked(layer, name, seen)
    mask = np.ones((2, 5, 5), bool)
    layer(X, X, attention_mask=mask, use_causal_mask=True, return_attention_scores=True)
    assert {name for name, *_ in seen} == set(_keras.ATTENTION_HOOKS)
    assert _keras.stock_arguments(stock, {"seed": 1, "mask_spec": None}) == {"seed": 1}


@relies_on("SINCE", breaks="an argument that this Keras lacks would be ignored")
@pytest.mark.parametrize("name", _keras.SINCE)
def test_what_an_older_keras_lacks_is_refused(name):
    class Old:
        def __init__(self, num_heads):
            pass

    version, otherwise = _keras.SINCE[name]
    said = f"`{name}` needs Keras {version}, .* {name}=2. Update Keras, {re.escape(otherwise)}"
    with pytest.raises(ValueError, match=said):
        _keras.stock_arguments(Old, {"num_heads": 1, name: 2})
    assert _keras.stock_arguments(Old, {"num_heads": 1, name: None}) == {"num_heads": 1}
    assert (numbers(keras.__version__) >= numbers(version)) == (name in HAS)


@relies_on("flash FLASH", breaks="probabilities of a layer with a flash kernel cannot be seen")
def test_flash_is_switched_off_on_a_stand_in():
    layer = attention(flash_attention=True)
    assert _keras.flash(layer)
    assert not _keras.flash(attention(flash_attention=False))
    stand_in = object.__new__(MHA)
    vars(stand_in).update(vars(layer) | {_keras.FLASH: False})
    _, scores = stand_in(X, X, return_attention_scores=True)
    assert tuple(scores.shape) == (2, 2, 5, 5)


@relies_on("KERAS_HUB_HOOKS part part_name", breaks="no rule would reach KerasHub's decoders")
def test_the_parts_of_kerashubs_attention():
    hub = pytest.importorskip("keras_hub", exc_type=ImportError).models  # (or for another Keras)
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "vocabulary_size": 9}
    grouped = sizes | {"num_query_heads": 4, "num_key_value_heads": 2}
    llama, mistral = hub.LlamaBackbone(**grouped), hub.MistralBackbone(**grouped)
    models = llama, mistral, hub.GemmaBackbone(head_dim=2, **grouped)
    of = [x for model in models for x in _keras.layers_of(model) if adapter_of(x) is not None]
    names = [_keras.part_name(layer, "num_query_heads") for layer in of[:2]]
    assert names == ["num_query_heads", "_num_query_heads"]
    assert isinstance(_keras.part(of[0], "softmax"), keras.layers.Softmax)
    defined = {name for layer in of for cls in type(layer).__mro__ for name in vars(cls)}
    assert {*_keras.KERAS_HUB_HOOKS} - defined <= {"_compute_bidirectional_sliding_mask"}


@relies_on(
    "traces_function for_shapes_alone in_symbolic_scope graph_of_function is_function_graph "
    "infers_shapes",
    breaks="a function compiled inside a model would keep what was traced for shapes",
)
def test_functions_that_are_compiled_while_keras_infers_shapes():
    seen = []

    def see(x):
        seen.append((_keras.for_shapes_alone(), _keras.traces_function()))
        return x

    def compiled(function):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.function(function, autograph=False)
        import jax

        return jax.jit(function)

    class Mine(keras.Layer):
        def call(self, x):
            return see(x)

    class Compiles(keras.Layer):
        def call(self, x):
            return compiled(see)(x)

    x = keras.Input((5, 8))
    Mine()(x)
    Mine()(X)
    assert {*seen[:-1]} == {(True, False)}  # PyTorch runs it twice
    assert seen.pop() == (False, False)
    if BACKEND != "torch":
        seen.clear()
        Compiles()(x)
        compiled(see)(X)
        assert seen == [(False, True)] * 2
        seen.clear()
        compiled(lambda x: (x, Mine().compute_output_spec(keras.KerasTensor(x.shape)))[0])(X)
        assert seen == [(True, False)]


# --- Layers and graphs ---------------------------------------------------------------------------


@relies_on(
    "GRAPH",
    breaks="a model with `add_inputs=True` would run, or be saved, without its new input",
)
def test_what_a_graph_is_made_of():
    model = graph()
    function = keras.Function(model.inputs, model.outputs)
    operation, _ = _keras.made_by(ops.relu(keras.Input((3,))))
    made = {name for name in set(vars(function)) - set(vars(operation)) if name[:6] != "_self_"}
    assert made == set(_keras.GRAPH)
    new = keras.Input((1,), name="new")
    wider = keras.Model([model.input, new], model.output + new)  # (3.13 takes no unread input)
    vars(model).update({name: vars(wider)[name] for name in _keras.GRAPH})
    assert [tensor.name for tensor in model.inputs] == ["x", "new"]
    assert len(model.input) == 2
    assert len(model.get_config()["input_layers"]) == 2
    assert tuple(model([np.ones((1, 3)), np.ones((1, 1))]).shape) == (1, 2)


@relies_on(
    "nodes made_by made_of calls_of",
    breaks="self- and cross-attention, and their order, would not be told apart",
)
def test_a_graph_shows_its_calls():
    model = graph()
    nodes = [node for node in _keras.nodes(model) if node.input_tensors]
    first, relu, second = (node.operation for node in nodes)
    assert (first.name, second.name) == ("first", "second")
    assert nodes[0].arguments.args == (model.input,)
    assert nodes[-1].outputs == [model.output]
    assert _keras.made_by(model.output) == (second, nodes[1].outputs)
    assert _keras.calls_of(relu)[0].input_tensors == nodes[0].outputs
    assert isinstance(_keras.made_by(model.input)[0], keras.layers.InputLayer)
    assert _keras.made_by(keras.KerasTensor((2,))) == (None, [])
    made_of = [id(x) for x in _keras.made_of([model.output])]
    assert made_of == [id(x) for x in (model.input, *(node.outputs[0] for node in nodes))]


@relies_on(
    "_default_save_signature", breaks="a model that holds a masked one could not be exported"
)
def test_tensorflow_asks_each_model_for_a_signature():
    if BACKEND == "tensorflow":
        assert callable(graph()._default_save_signature)
        assert keras.layers.Dense(2)._default_save_signature is None


@relies_on("uncompile", breaks="a copy of KerasHub's task would train by what nobody asked for")
def test_a_model_is_compiled_no_more():
    model, other = graph(), graph()
    model.compile("sgd", "mse", metrics=["mae"])
    model.sampler, other.sampler, other.generate_function = "default", "greedy", "of other"
    _keras.uncompile(model, other)
    assert (model.compiled, model.loss, model.metrics) == (False, None, [])
    assert "optimizer" not in vars(model)
    assert (model.sampler, model.generate_function) == ("greedy", None)
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        model.fit(X[0, :, :3], X[0, :, :2], verbose=0)


@relies_on("copy_values", breaks="a copy of Gemma 3n would multiply by another table than its own")
def test_values_of_a_graph_are_copied():
    def scaled(values):
        x = keras.Input((3,))
        return keras.Model(x, ops.multiply(x, ops.convert_to_tensor(values, "float32")))

    source, target = scaled([1, 2, 3]), scaled([4, 5, 6])
    _keras.copy_values(source, target)
    np.testing.assert_array_equal(*(ops.convert_to_numpy(m(X[0, :, :3])) for m in (source, target)))
    other = scaled([[7]])  # of another shape: not the same call
    _keras.copy_values(source, other)
    assert ops.convert_to_numpy(other(np.ones((1, 3)))).tolist() == [[7, 7, 7]]


@relies_on("is_assisted", breaks="a model that drafts would find no keys of the other")
def test_a_model_that_drafts_shows():
    task = pytest.importorskip("keras_hub").models.Gemma4CausalLM
    assert "self._assistant_model = assistant_model" in inspect.getsource(task.generate)
    assert not _keras.is_assisted(object())
    assert _keras.is_assisted(types.SimpleNamespace(_assistant_model=1))


@relies_on(
    "around_exports", breaks="a file for ONNX Runtime would hold loops it lacks, others gradients"
)
def test_a_model_looks_up_how_it_is_exported(monkeypatch):
    from keras.src import export

    seen = []
    for name in ("onnx", "openvino", "saved_model"):

        def record(*_, name=name, **__):
            seen.append((name, is_dense_scope(), is_forward_only()))

        monkeypatch.setattr(export, f"export_{name}", record)
    dense = ("export_onnx", "export_openvino")
    _keras.patches.around_exports(dict.fromkeys(dense, hm.dense_scope))
    _keras.patches.around_exports({"export_saved_model": forward_only})
    for name in ("onnx", "openvino", "tf_saved_model"):
        graph().export("a file", format=name)
    of_dense = [(name, True, False) for name in ("onnx", "openvino")]
    assert seen == [*of_dense, ("saved_model", False, True)]
    assert not is_dense_scope()
    assert not is_forward_only()


@relies_on(
    "REMATERIALIZED_CALL remat_mode set_remat_mode",
    breaks="layers under a RematScope would lose their rule in the backward pass, or in a copy",
)
def test_rematerialised_layers():
    with keras.RematScope(mode="full"):
        inside = keras.layers.Dense(2)
    layer, seen = keras.layers.Dense(2), []
    assert _keras.remat_mode(layer) is None
    _keras.set_remat_mode(layer, _keras.remat_mode(inside))
    assert _keras.remat_mode(layer).mode == "full"
    hooked(layer, _keras.REMATERIALIZED_CALL, seen)(X)
    ((_, (call, *_), _),) = seen
    assert callable(call)


@relies_on("sublayers", breaks="attention inside other layers would not be found, or not copied")
def test_layers_inside_layers():
    class Block(keras.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [keras.Sequential([keras.layers.Dense(2)])]

    block = Block()
    assert list(_keras.sublayers(block)) == block.parts
    assert list(_keras.sublayers(_keras.made_by(ops.relu(keras.Input((3,))))[0])) == []


@relies_on(
    "taken_by_inputs", breaks="a backbone taken out of a masked task would not obey by itself"
)
def test_what_the_inputs_of_a_functional_model_take():
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
    for inputs, given in (({"b": b, "a": a}, {"a": 1, "b": 2, "c": 3}), ([b, a], [2, 1])):
        model = keras.Model(inputs, keras.layers.Concatenate()([a, b]))
        taken = dict(_keras.taken_by_inputs(model, given))
        assert (taken.keys(), taken[1] is a, taken[2] is b) == ({1, 2}, True, True)
        assert _keras.taken_by_inputs(model, [1]) == []


# --- Files ---------------------------------------------------------------------------------------


@relies_on(
    "unpickle_model saving_lib KerasSaveable",
    breaks="a masked model could not be pickled, nor copied by `deepcopy`",
)
def test_pickles_call_one_function():
    model = graph()
    function, arguments = model.__reduce__()
    assert function.__func__ is _keras.files.unpickle_model.__func__
    twin = pickle.loads(pickle.dumps(_keras.files.unpickle_model))(*arguments)
    x = np.ones((1, 3), "float32")
    np.testing.assert_allclose(*(ops.convert_to_numpy(m(x)) for m in (model, twin)))


# --- TensorFlow and PyTorch ----------------------------------------------------------------------


@pytest.mark.tensorflow
@relies_on("in_xla", breaks="`jit_compile=True` would fail for rules at unknown lengths")
def test_xla_is_told():
    import tensorflow as tf

    seen = []
    for jit_compile in (False, True):
        note = lambda: seen.append(_keras.tensorflow.in_xla())  # noqa: E731
        tf.function(note, autograph=False, jit_compile=jit_compile)()
    assert seen == [False, True]
    assert not _keras.tensorflow.in_xla()


@pytest.mark.tensorflow
@relies_on("checks_numerics", breaks="`tf.debugging.enable_check_numerics` would find faults in us")
def test_tensorflow_says_whether_it_checks_numerics():
    import tensorflow as tf

    assert not _keras.tensorflow.checks_numerics()
    tf.debugging.enable_check_numerics()
    assert _keras.tensorflow.checks_numerics()
    tf.debugging.disable_check_numerics()
    assert not _keras.tensorflow.checks_numerics()


@pytest.mark.tensorflow
@relies_on(
    "function_type traces is_of_trainer",
    breaks="`copy=False` would leave functions without the rule, or refuse models that were fitted",
)
def test_functions_show_what_they_traced_and_who_made_them():
    import gc

    import tensorflow as tf

    of_tensorflow, variable = _keras.tensorflow, tf.Variable(1.0)
    function = tf.function(lambda: variable + 1)
    assert of_tensorflow.traces(function) == []
    function()
    (trace,) = of_tensorflow.traces(function)
    assert trace.variables[0] is variable
    model = graph()
    model.compile("sgd", "mse")
    model.predict(np.ones((1, 3)), verbose=0)
    kind = of_tensorflow.function_type()
    assert isinstance(function, kind)
    made = [x for x in gc.get_objects() if issubclass(type(x), kind) and of_tensorflow.traces(x)]
    assert any(map(of_tensorflow.is_of_trainer, made))
    assert not of_tensorflow.is_of_trainer(function)


@pytest.mark.tensorflow
@relies_on("are_as_long", breaks="what is of a sequence is made in each layer, or lengths mixed up")
def test_projections_of_one_sequence_are_as_long():
    import tensorflow as tf

    def kinds(x, other, weights):
        def project(x):
            return tf.einsum("btd,dhk->bthk", x, weights) + tf.zeros([2, 3])

        query, key = project(x), tf.cast(project(x), "float64")
        return [
            _keras.tensorflow.are_as_long(query, key),
            _keras.tensorflow.are_as_long(query, project(other)),
            _keras.tensorflow.are_as_long(query, project(x[:, :1])),
            _keras.tensorflow.are_as_long(x + x, x),  # what is added may be longer than 1
            _keras.tensorflow.are_as_long(x, eager),
        ]

    seen, eager = [], tf.ones([1, 1, 4])
    operand = tf.TensorSpec([None, None, 4])
    function = tf.function(lambda *given: seen.extend(kinds(*given)))
    function.get_concrete_function(operand, operand, tf.TensorSpec([4, 2, 3]))
    assert seen == [True, False, False, False, False]


@relies_on("in_forward_mode in_vectorized_map unrecorded", breaks="jvp or maps of gradients raise")
def test_forward_mode_and_maps_are_seen():
    import tensorflow as tf

    x, seen = tf.constant([1.0, 2.0]), []

    @_keras.tensorflow.custom_gradient
    def triple(x):
        with _keras.tensorflow.unrecorded():
            return 3 * x, lambda upstream: [30 * upstream]

    def note(x):
        seen.append((_keras.tensorflow.in_forward_mode(x), _keras.tensorflow.in_vectorized_map()))
        return triple(x)

    note(x)
    tf.function(note)(x)
    tf.vectorized_map(note, x)
    assert seen == [(False, False), (False, False), (False, True)]

    def forward_mode(x):
        with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
            y = note(x)
        return accumulator.jvp(y)

    for made in (forward_mode(x), tf.function(forward_mode)(x)):
        np.testing.assert_array_equal(made, 30 * x)
    assert seen[3:] == [(True, False)] * 2


@relies_on("is_seeded", breaks="what is computed again for a gradient would drop something else")
def test_keras_takes_a_seed_that_is_drawn():
    seeds = [None, 3, keras.random.SeedGenerator(), keras.random.SeedGenerator(3)]
    assert [_keras.is_seeded(seed) for seed in seeds] == [False, True, False, True]
    dtype = "uint32" if keras.backend.backend() == "jax" else "int32"
    drawn = _keras.DrawnSeed(ops.convert_to_tensor([1, 2], dtype))
    one, again = (keras.random.dropout(ops.ones(99), 0.5, seed=drawn) for _ in range(2))
    np.testing.assert_array_equal(ops.convert_to_numpy(one), ops.convert_to_numpy(again))


@pytest.mark.tensorflow
@relies_on("for_branches _with_gradient", breaks="gradients of the branch that did not run add up")
def test_the_gradient_is_that_of_the_branch_that_ran():
    import tensorflow as tf

    @tf.function
    def gradient(x, is_first):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (first,), (second,) = _keras.tensorflow.for_branches(is_first, [x])
            y = tf.cond(is_first, lambda: 3 * first, lambda: x[:0])
            y = tf.cond(is_first, lambda: y, lambda: 5 * second)
        return tape.gradient(y, x)

    made = [gradient(tf.ones([2]), tf.constant(is_first)).numpy() for is_first in (True, False)]
    np.testing.assert_array_equal(made, [[3, 3], [5, 5]])


@pytest.mark.tensorflow
@relies_on("custom_gradient outermost_graph", breaks="models that are gone would keep their memory")
def test_a_custom_gradient_goes_with_its_graph():
    """Its gradient is found by `tf.gradients` and by a tape, within branches, too."""
    import tensorflow as tf
    from tensorflow.python.framework import ops as of_tensorflow

    @_keras.tensorflow.custom_gradient
    def triple(x):
        graphs.append(_keras.tensorflow.outermost_graph())
        return 3 * x, lambda upstream: [30 * upstream]  # (not 3, which TensorFlow would give)

    @tf.function
    def by_tape(x):
        graphs.append(tf.compat.v1.get_default_graph())
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(x > 0, lambda: triple(x), lambda: x)
        return y, tape.gradient(y, x)

    @tf.function
    def by_graph(x):
        y = triple(x)
        return y, tf.gradients(y, x)[0]

    graphs, known = [], len(of_tensorflow.gradient_registry.list())
    for function in (by_tape, by_graph):
        assert [float(value) for value in function(tf.constant(2.0))] == [6, 30]
    assert graphs[0] is graphs[1]
    assert len(of_tensorflow.gradient_registry.list()) == known
