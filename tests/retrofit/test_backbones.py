"""Each backbone that KerasHub builds from Keras' attention obeys a rule; the others refuse it."""

import functools
import inspect

import backbones
import decoders
import keras
import numpy as np
import pytest
from backbone_calls import built, called, data, given_to, randomised
from contract import numpy
from fresh import reload_fresh

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
BY_NAME = {entry.name: entry for entry in backbones.COVERED}
# Of KerasHub's encoder layer, as BERT and ALBERT.
ALIKE = "RobertaBackbone", "XLMRobertaBackbone", "DistilBertBackbone", "ElectraBackbone"


@pytest.fixture(scope="module")
def models():
    """By its name, the stock model and the masked one, made once."""

    @functools.cache
    def made(name):
        keras.utils.set_random_seed(0)
        stock = randomised(built(name, BY_NAME[name].arguments))
        return stock, hm.apply_head_masks(stock, hm.Chunk(4))

    return made


@pytest.mark.parametrize("name", BY_NAME)
def test_full_is_stock(models, name):
    stock, _ = models(name)
    full, given = hm.apply_head_masks(stock, hm.Full()), data(stock)
    for a, b in zip(full.weights, stock.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    for output, wanted in called(stock, given).items():
        np.testing.assert_array_equal(called(full, given)[output], wanted)
    assert type(full).__name__ == name
    assert isinstance(full, getattr(keras_hub.models, name))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.long if x in ALIKE else ()) for x in BY_NAME]
)
def test_nothing_leaks_through_a_rule(models, name):
    stock, masked = models(name)
    for leak in BY_NAME[name].leaks:
        given = data(stock)
        changed = {key: value.copy() for key, value in given.items()}
        changed[leak.input][leak.place] = 1 if "token" in leak.input else 3.0

        def moved(model, leak=leak, given=given, changed=changed):
            before, after = (called(model, x) for x in (given, changed))
            output = leak.output if leak.output in before else "only"
            return abs(before[output] - after[output])[0, leak.rows].max()

        assert moved(stock) > 1e-3  # else the check could not fail
        assert moved(masked) == 0


@pytest.mark.long  # (`test_examples` does it every day)
def test_all_reload_in_a_fresh_process(models, tmp_path):
    masked = {name: models(name)[1] for name in BY_NAME}
    reload_fresh(tmp_path, {k: (x, given_to(x)) for k, x in masked.items()}, "keras_hub")


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
