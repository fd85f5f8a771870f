"""A public call looks at a model once, and keeps nothing of what it saw."""

import collections
import gc
import inspect
import weakref

import keras
import numpy as np
import pytest
from export_models import check_in_this_process
from keras import layers

import keras_headmask as hm
from keras_headmask.retrofit import survey

pytestmark = pytest.mark.tensorflow  # the looks are the same on every backend
RULE = hm.PerHead({0: hm.Nothing(), 1: hm.SameSentence(9)})
IDS = np.array([[3, 9, 4, 5, 9, 6], [5, 4, 9, 3, 6, 9]], "int32")


def stock():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    for name in ("first", "second"):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4, name=name)(x, x)])
    return keras.Model(ids, layers.Dense(3)(x))


def masked():
    return hm.apply_head_masks(stock(), RULE)


def task():
    hub = pytest.importorskip("keras_hub").models
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = hub.GPT2Backbone(vocabulary_size=12, max_sequence_length=16, **sizes)
    return hub.GPT2CausalLM(backbone, preprocessor=None)


def exported(model, folder):
    hm.export_saved_model(model, folder, check={"token_ids": IDS})


# By a name: a model, and a call on it and on a folder.
CALLS = {
    "apply_head_masks": (stock, lambda model, _: hm.apply_head_masks(model, RULE)),
    "apply_head_masks in place": (
        stock,
        lambda model, _: hm.apply_head_masks(model, RULE, copy=False),
    ),
    "attention_probabilities": (masked, lambda model, _: hm.attention_probabilities(model, IDS)),
    "explain": (masked, lambda model, _: hm.explain(model, queries=6)),
    "export_saved_model": (masked, exported),
    "lint": (masked, lambda model, _: hm.lint(model)),
    "mask_specs": (masked, lambda model, _: hm.mask_specs(model)),
    "measure_heads": (masked, lambda model, _: hm.measure_heads(model, IDS)),
    "plot_attention": (masked, lambda model, _: hm.plot_attention(model, IDS)),
    "suggest_rules": (stock, lambda model, _: hm.suggest_rules(model, IDS)),
    "summary_masks": (masked, lambda model, _: hm.summary_masks(model, lambda _: None)),
    "unmasked": (masked, lambda model, _: hm.unmasked(model)),
}


@pytest.fixture
def looks(monkeypatch):
    """The models that are looked at, and weak references to what is seen."""
    check_in_this_process(monkeypatch)  # of exports
    models, seen, usual = [], [], survey.Survey.__init__

    def counted(self, model):
        models.append(model)
        seen.append(weakref.ref(self))
        usual(self, model)

    monkeypatch.setattr(survey.Survey, "__init__", counted)
    return models, seen


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_looks_once_at_each_model(name, looks, tmp_path):
    make, call = CALLS[name]
    model, (models, seen) = make(), looks
    models.clear()
    seen.clear()
    call(model, tmp_path / "versions")
    counts = collections.Counter(map(id, models))
    assert counts.pop(id(model)) == 1
    assert set(counts.values()) <= {1}  # of copies
    gc.collect()
    assert not [one for one in seen if one() is not None], "what was seen outlives the call"


def test_every_public_function_of_a_model_is_counted():
    def first(function):
        return next(iter(inspect.signature(function).parameters), None)

    public = {name: getattr(hm, name) for name in hm.__all__}
    functions = {k: x for k, x in public.items() if inspect.isfunction(x)}
    of_models = {name for name, x in functions.items() if first(x) in ("model", "task")}
    assert of_models - {"head_layout"} <= CALLS.keys()


def test_notebooks_look_once(looks):
    from keras_headmask.look import notebook

    model = masked()
    looks[0].clear()
    notebook._model_html(model)
    assert looks[0] == [model]
