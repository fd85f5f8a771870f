"""What TensorFlow writes to standard error while models with rules run."""

import pytest
from fresh import run_fresh

pytestmark = pytest.mark.tensorflow

CODE = """
import os, re, sys, tempfile
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
import keras
import numpy as np
import keras_headmask as hm

def kinds(run):
    "The lines that `run` has written to standard error, numbers aside."
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            run()
        finally:
            os.dup2(kept, 2)
        file.seek(0)
        lines = file.read().decode().splitlines()
    return {re.sub(r"[0-9]+", "0", re.sub(r"^[EIW][0-9]{4} [0-9:. ]+", "", x)) for x in lines}

ids = keras.Input((None,), dtype="int32", name="ids")
x = keras.layers.Embedding(9, 8, mask_zero=True)(ids)
stock = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4)(x, x))
rule = hm.PerHead({0: hm.SameSegment("ids")}, hm.Window(3, 3))

def runs(model):
    model.compile("sgd", "mse")
    def run():
        for length in (5, 9):  # the second compiles for any length
            given = np.arange(2 * length).reshape(2, length) % 9
            if sys.argv[1] == "fit":
                model.fit(given, np.ones((2, length, 8)), verbose=0)
            else:
                model.predict(given, verbose=0)
    return run

of_stock = kinds(runs(stock))
if sys.argv[1] == "fit":
    layer = hm.PerHeadMaskedMultiHeadAttention  # without a rule it obeys padding
    model = keras.Model(ids, layer(2, 4)(layer(2, 4, mask_spec=hm.Window(3, 3))(x, x), x))
else:
    model = hm.apply_head_masks(stock, rule)
more = kinds(runs(model)) - of_stock
assert not more, more
"""


@pytest.mark.parametrize("called", [pytest.param("predict", marks=pytest.mark.long), "fit"])
def test_nothing_is_logged_that_stock_layers_do_not_log(called):
    run_fresh(CODE, called)
