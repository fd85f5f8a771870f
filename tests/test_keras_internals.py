"""What the package relies on inside Keras and its backends, so that a new one fails here first.

Each test names what of `_keras.py` it covers, and says what its failure means for users. Names
whose change a law of users sees stand in `versions.SEEN_BY`.
"""

import ast
import contextlib
import inspect
import re
import runpy
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_versions import HAS, numbers
from versions import SEEN_BY

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.layers import grouped_query, masked, multi_head
from keras_headmask.retrofit import masked_attention, masked_model
from keras_headmask.retrofit.adapters import adapted, adapter_of

BACKEND = keras.backend.backend()
MHA, GQA = layers.MultiHeadAttention, layers.GroupQueryAttention
each_stock = pytest.mark.parametrize("stock", [MHA, GQA])
X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
COVERED = set()


@contextlib.contextmanager
def says(names, breaks):
    try:
        yield
    except Exception as error:
        what = f"Keras {keras.__version__} on {BACKEND} changed `{names}`"
        raise AssertionError(f"{what}: {breaks}. ({error})") from error


def relies_on(names, breaks):
    """Cover `names` of `_keras.py`; a failure says what it breaks."""
    COVERED.update(names.split())
    return says(names, breaks)


def attention(cls=MHA, **kwargs):
    """Two heads of size 4; those of grouped-query attention share a key head."""
    sizes = (4, 2, 1) if issubclass(cls, GQA) else (2, 4)
    layer = cls(*sizes, name="attention", **kwargs)
    layer.build((2, 5, 8), (2, 5, 8))
    return layer


def graph():
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(2)(x))


def test_every_private_name_is_covered():
    names = set(_keras.OVERRIDDEN)
    for node in ast.parse(Path(_keras.__file__).read_text()).body:
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


def test_a_keras_that_is_too_old_is_refused_at_import(monkeypatch):
    asked = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    oldest = re.search('"keras>=([0-9.]+),', asked)[1]
    monkeypatch.setattr(keras, "__version__", "3.12.4")
    said = rf"needs Keras {oldest} or later, and this is Keras 3.12.4. .* --upgrade keras$"
    with pytest.raises(ImportError, match=said):
        runpy.run_path(hm.__file__)


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (hm.PerHeadMaskedMultiHeadAttention, MHA),
        (hm.PerHeadMaskedGroupedQueryAttention, GQA),
        (masked.MaskedAttention, MHA),
        (masked.MaskedAttention, GQA),
        (masked_attention.Part, MHA),
        *((cls, _keras.Functional) for cls in (masked_model.InnerModel, masked_model.MaskedModel)),
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
    files = [Path(module.__file__) for module in (masked, multi_head, grouped_query)]
    stored = {
        node.attr
        for node in (node for file in files for node in ast.walk(ast.parse(file.read_text())))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    private = {name for name in stored if name.startswith("_")}
    assert "_mask_spec" in private
    assert not [name for name in private if hasattr(attention(stock), name)]


@relies_on("find", breaks="a name that moved would be missed, or its loss not be said")
def test_a_private_name_is_looked_for_in_each_place():
    places = "keras.src.moved", "keras.src.backend.moved.nn", "keras.src.models.model.Model"
    assert _keras.find(*places) is keras.Model
    said = rf"needs {places[0]} or {places[1]}, which Keras .* lacks. Install a version .* names"
    with pytest.raises(ImportError, match=said):
        _keras.find(*places[:2])


@relies_on("ATTENTION_HOOKS stock_arguments", breaks="a subclass's own mask would be passed over")
@each_stock
def test_attention_passes_all_hooks(stock, monkeypatch):
    layer, seen = attention(stock, **({"sliding_window": 2} if "sliding_window" in HAS else {})), []
    for name in _keras.ATTENTION_HOOKS:
        usual = getattr(layer, name)
        note = lambda *args, n=name, f=usual, **more: (seen.append(n), f(*args, **more))[1]  # noqa: E731
        monkeypatch.setitem(vars(layer), name, note)
    mask = np.ones((2, 5, 5), bool)
    layer(X, X, attention_mask=mask, use_causal_mask=True, return_attention_scores=True)
    assert {*seen} == {*_keras.ATTENTION_HOOKS}
    assert _keras.stock_arguments(stock, {"seed": 1, "mask_spec": None}) == {"seed": 1}


@relies_on("SINCE", breaks="an argument that this Keras lacks would be ignored")
@pytest.mark.parametrize("name", _keras.SINCE)
def test_what_an_older_keras_lacks_is_refused(name):
    old = lambda num_heads: None  # noqa: E731
    version, otherwise = _keras.SINCE[name]
    said = f"`{name}` needs Keras {version}, .* {name}=2. Update Keras, {re.escape(otherwise)}"
    with pytest.raises(ValueError, match=said):
        _keras.stock_arguments(old, {"num_heads": 1, name: 2})
    assert _keras.stock_arguments(old, {"num_heads": 1, name: None}) == {"num_heads": 1}
    assert (numbers(keras.__version__) >= numbers(version)) == (name in HAS)


@relies_on("flash FLASH", breaks="probabilities of a layer with a flash kernel cannot be seen")
def test_flash_is_switched_off_on_a_stand_in():
    asked = [attention(flash_attention=asked) for asked in (True, False)]
    assert list(map(_keras.flash, asked)) == [True, False]
    stand_in = object.__new__(MHA)
    vars(stand_in).update(vars(asked[0]) | {_keras.FLASH: False})
    _, scores = stand_in(X, X, return_attention_scores=True)
    assert tuple(scores.shape) == (2, 2, 5, 5)


@relies_on("KERAS_HUB_HOOKS", breaks="no rule would reach KerasHub's decoders")
def test_the_parts_of_kerashubs_attention():
    hub = pytest.importorskip("keras_hub", exc_type=ImportError).models  # (or for another Keras)
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "vocabulary_size": 9}
    grouped = sizes | {"num_query_heads": 4, "num_key_value_heads": 2}
    llama, mistral = hub.LlamaBackbone(**grouped), hub.MistralBackbone(**grouped)
    models = llama, mistral, hub.GemmaBackbone(head_dim=2, **grouped)
    of = [x for model in models for x in _keras.layers_of(model) if adapter_of(x) is not None]
    assert [adapted(layer).num_key_heads for layer in of] == [2, 2, 2]
    defined = {name for layer in of for cls in type(layer).__mro__ for name in vars(cls)}
    assert {*_keras.KERAS_HUB_HOOKS} - defined <= {"_compute_bidirectional_sliding_mask"}


@relies_on("is_assisted", breaks="a model that drafts would find no keys of the other")
def test_a_model_that_drafts_shows():
    task = pytest.importorskip("keras_hub").models.Gemma4CausalLM
    assert "self._assistant_model = assistant_model" in inspect.getsource(task.generate)
    assert not _keras.is_assisted(object())
    assert _keras.is_assisted(types.SimpleNamespace(_assistant_model=1))


@relies_on("is_seeded", breaks="what is computed again for a gradient would drop something else")
def test_keras_takes_a_seed_that_is_drawn():
    seeds = [None, 3, keras.random.SeedGenerator(), keras.random.SeedGenerator(3)]
    assert [_keras.is_seeded(seed) for seed in seeds] == [False, True, False, True]
    dtype = "uint32" if BACKEND == "jax" else "int32"
    drawn = _keras.DrawnSeed(ops.convert_to_tensor([1, 2], dtype))
    one, again = (keras.random.dropout(ops.ones(99), 0.5, seed=drawn) for _ in range(2))
    np.testing.assert_array_equal(ops.convert_to_numpy(one), ops.convert_to_numpy(again))


@relies_on(
    "traces_function for_shapes_alone in_symbolic_scope in_function",
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

    x = keras.Input((5, 8))
    layers.Lambda(see)(x)
    layers.Lambda(see)(X)
    assert {*seen[:-1]} == {(True, False)}  # PyTorch runs it twice
    assert seen.pop() == (False, False)
    if BACKEND != "torch":
        seen.clear()
        layers.Lambda(compiled(see))(x)
        compiled(see)(X)
        infer = layers.Lambda(see).compute_output_spec
        compiled(lambda x: (x, infer(keras.KerasTensor(x.shape)))[0])(X)
        assert seen == [(False, True), (False, True), (True, False)]


@pytest.mark.tensorflow
@relies_on("in_xla", breaks="`jit_compile=True` would fail for rules at unknown lengths")
def test_xla_is_told():
    import tensorflow as tf

    seen = []
    note = lambda: seen.append(_keras.in_xla())  # noqa: E731
    for jit_compile in (False, True):
        tf.function(note, autograph=False, jit_compile=jit_compile)()
    note()
    assert seen == [False, True, False]


@pytest.mark.tensorflow
@relies_on("are_as_long", breaks="what is of a sequence is made in each layer, or lengths mixed up")
def test_projections_of_one_sequence_are_as_long():
    import tensorflow as tf

    def kinds(x, other, weights):
        def project(x):
            return tf.einsum("btd,dhk->bthk", x, weights) + tf.zeros([2, 3])

        key = tf.cast(project(x), "float64")
        pairs = [(project(x), y) for y in (key, project(other), project(x[:, :1]))]
        pairs += [(x + x, x), (x, eager)]  # what is added may be longer than 1
        return [_keras.are_as_long(*pair) for pair in pairs]

    seen, eager = [], tf.ones([1, 1, 4])
    operand = tf.TensorSpec([None, None, 4])
    function = tf.function(lambda *given: seen.extend(kinds(*given)))
    function.get_concrete_function(operand, operand, tf.TensorSpec([4, 2, 3]))
    assert seen == [True, False, False, False, False]


@pytest.mark.tensorflow
@relies_on("for_branches _with_gradient", breaks="gradients of the branch that did not run add up")
def test_the_gradient_is_that_of_the_branch_that_ran():
    import tensorflow as tf

    @tf.function
    def gradient(x, is_first):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (first,), (second,) = _keras.for_branches(is_first, [x])
            y = tf.cond(is_first, lambda: 3 * first, lambda: x[:0])
            y = tf.cond(is_first, lambda: y, lambda: 5 * second)
        return tape.gradient(y, x)

    made = [gradient(tf.ones([2]), tf.constant(is_first)).numpy() for is_first in (True, False)]
    np.testing.assert_array_equal(made, [[3, 3], [5, 5]])


@pytest.mark.tensorflow
@relies_on("custom_gradient outermost_graph", breaks="what is gone would keep its memory")
@relies_on("in_forward_mode unrecorded", breaks="`tf.autodiff.ForwardAccumulator` would raise")
def test_a_custom_gradient_is_found_by_tapes_by_graphs_and_by_forward_mode():
    import tensorflow as tf

    @_keras.custom_gradient
    def triple(x):
        graphs.append(_keras.outermost_graph())
        with _keras.unrecorded():
            return 3 * x, lambda upstream: [30 * upstream]  # (not what TensorFlow would give)

    def by_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(x[0] > 0, lambda: triple(x), lambda: x)
        return tape.gradient(y, x)

    def forward_mode(x):
        with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
            assert _keras.in_forward_mode(x)
            y = triple(x)
        return accumulator.jvp(y)

    graphs, run = [], tf.function(by_tape)
    assert run.get_concrete_function(tf.ones([2])).graph is graphs[0]
    by_graph = tf.function(lambda x: tf.gradients(triple(x), x)[0])
    assert not _keras.in_forward_mode(tf.ones([2]))
    for derive in (by_tape, run, by_graph, forward_mode, tf.function(forward_mode)):
        assert derive(tf.ones([2])).numpy().tolist() == [30, 30]
