"""Each backbone that KerasHub builds from Keras' attention obeys a rule; the others refuse it."""

import inspect

import backbones
import decoders
import keras
import numpy as np
import pytest
from backbone_calls import built, called, data, randomised
from contract import numpy
from fresh import run_fresh

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
NAMES = [entry.name for entry in backbones.COVERED]


@pytest.fixture(scope="module")
def models():
    made = {}
    for entry in backbones.COVERED:
        keras.utils.set_random_seed(0)
        stock = randomised(built(entry.name, entry.arguments))
        made[entry.name] = entry, stock, hm.apply_head_masks(stock, hm.Chunk(4))
    return made


@pytest.mark.long
def test_what_a_model_around_a_masked_backbone_adds_is_saved_with_it(models, tmp_path):
    _, _, masked = models["BertBackbone"]
    outer = keras.Model(masked.input, keras.layers.Dense(2)(masked.output["sequence_output"]))
    both = hm.apply_head_masks(outer, hm.Window(1, 1), existing="and")
    both.save(tmp_path / "both.keras")
    loaded = keras.saving.load_model(tmp_path / "both.keras")
    assert set(hm.mask_specs(loaded).values()) == {hm.Chunk(4) & hm.Window(1, 1)}
    given = data(masked)
    np.testing.assert_array_equal(numpy(loaded(given)), numpy(both(given)))
    called_on = keras.Model(masked.input, masked(masked.input)["sequence_output"])
    both = hm.apply_head_masks(called_on, hm.Window(1, 1), existing="and")
    both.save(tmp_path / "called.keras")
    loaded = keras.saving.load_model(tmp_path / "called.keras")
    assert set(hm.mask_specs(loaded).values()) == {hm.Chunk(4) & hm.Window(1, 1)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_day("Bart|Whisper|Bert")
def test_full_is_stock(models, name):
    _, stock, _ = models[name]
    full, given = hm.apply_head_masks(stock, hm.Full()), data(stock)
    for a, b in zip(full.weights, stock.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    for output, wanted in called(stock, given).items():
        np.testing.assert_array_equal(called(full, given)[output], wanted)
    assert type(full).__name__ == name
    assert isinstance(full, getattr(keras_hub.models, name))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaks_through_a_rule(models, name):
    entry, stock, masked = models[name]
    for leak in entry.leaks:
        given = data(stock)
        changed = {key: value.copy() for key, value in given.items()}
        changed[leak.input][leak.place] = 1 if "token" in leak.input else 3.0

        def moved(model, leak=leak, given=given, changed=changed):
            before, after = (called(model, x) for x in (given, changed))
            output = leak.output if leak.output in before else "only"
            return abs(before[output] - after[output])[0, leak.rows].max()

        assert moved(stock) > 1e-3  # else the check could not fail
        assert moved(masked) == 0


FRESH = """
import sys, pathlib, numpy as np, keras, keras_headmask, keras_hub
folder = pathlib.Path(sys.argv[1])
for file in folder.glob("*.keras"):
    model = keras.saving.load_model(file)
    given = dict(np.load(file.with_suffix(".in.npz")))
    given = given if isinstance(model.input, dict) else next(iter(given.values()))
    out = model(given)
    out = out if isinstance(out, dict) else {"only": out}
    out = {k: keras.ops.convert_to_numpy(v) for k, v in out.items()}
    np.savez(file.with_suffix(".out.npz"), **out)
"""


@pytest.mark.long  # (`test_families` has this every day)
def test_all_reload_in_a_fresh_process(models, tmp_path):
    wanted = {}
    for name, (_, stock, masked) in models.items():
        masked.save(tmp_path / f"{name}.keras")
        np.savez(tmp_path / f"{name}.in.npz", **data(stock))
        wanted[name] = called(masked, data(stock))
        effect = max(abs(called(stock, data(stock))[k] - v).max() for k, v in wanted[name].items())
        assert effect > 1e-3
    run_fresh(FRESH, tmp_path)
    for name, outputs in wanted.items():
        with np.load(tmp_path / f"{name}.out.npz") as out:
            for output, value in outputs.items():
                np.testing.assert_array_equal(out[output], value, err_msg=name)


@pytest.mark.parametrize("entry", backbones.REFUSED, ids=lambda entry: entry.name)
def test_other_attention_is_refused_by_name(entry):
    model = built(entry.name, entry.arguments)
    told = "holds no self-attention" if entry.attention is None else rf"\({entry.attention}\)"
    with pytest.raises(ValueError, match=told):
        hm.apply_head_masks(model, hm.Full())


def test_no_decoder_of_keras_hub_is_missing():
    """Each backbone of a model that generates text is reached by a rule, or refused with why."""
    tasks = keras_hub.models.CausalLM, keras_hub.models.Seq2SeqLM
    classes = [x for x in vars(keras_hub.models).values() if inspect.isclass(x)]
    decoding = {x.backbone_cls for x in classes if issubclass(x, tasks)} - {None}
    names = {entry.name for entry in (*backbones.COVERED, *backbones.REFUSED)}
    of_decoders = *decoders.FAMILIES, *decoders.ENCODER_DECODERS, *decoders.REFUSED
    names |= {entry.backbone for entry in of_decoders}
    listed = tuple(getattr(keras_hub.models, name) for name in names)
    missing = [x.__name__ for x in decoding if not issubclass(x, listed)]
    assert not missing, "add them to `decoders` or `backbones` in tests/support"
    assert len(decoding) > 25
    assert all(entry.why for entry in decoders.REFUSED)


def test_the_page_has_the_table():
    text = backbones.PAGE.read_text(encoding="utf-8")
    assert backbones.written(text) == text
