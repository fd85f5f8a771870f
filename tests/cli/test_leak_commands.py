"""The command that looks for leaks, on files."""

import keras
import numpy as np
import pytest
from keras import layers

pytest.importorskip("click")

from calling import CAUSAL, answer, as_json, failure
from small_models import TOKENS

pytestmark = pytest.mark.tensorflow  # one backend is enough for what is said


def saved(causal):
    ids = keras.Input((7,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    attention = layers.MultiHeadAttention(2, 3, name="attention")
    model = keras.Model(ids, attention(x, x, use_causal_mask=causal))
    model.save("causal.keras" if causal else "open.keras")
    return model


def test_leaks_of_a_keras_file():
    saved(causal=True)
    text = answer("leaks", "causal.keras", "-b", "1")
    assert text == "No leaks. Tried 21 of 21 hidden pairs of positions.\n"
    saved(causal=False)
    found = as_json("leaks", "open.keras", "--rule", CAUSAL, code=1)
    assert found["tried"] == found["pairs"] == len(found["leaks"]) == 42
    assert found["first_layer"] == "'attention' (MultiHeadAttention)"
    tokens = f'{{"token_ids": {TOKENS.tolist()}}}'
    text = answer("leaks", "open.keras", "--rule", CAUSAL, "--inputs", tokens, code=1)
    assert text.startswith("42 leaks. Tried 42 of 42 hidden pairs of positions, and 2 of 2 pairs")
    text = answer("leaks", "causal.keras", "--rule", '{"kind": "full"}', code=1)
    assert text.startswith("Nothing is hidden within a text, so nothing is proven")
    tolerant = as_json("leaks", "open.keras", "--rule", CAUSAL, "--tolerance", "1000")
    assert tolerant["leaks"] == []


def test_leaks_of_a_saved_model():
    saved(causal=True).export("served/1", verbose=False)
    message = failure("leaks", "served/1", "--rule", CAUSAL)
    assert "a SavedModel needs --rule and --inputs" in message
    tokens = f'{{"token_ids": {np.maximum(TOKENS, 1).tolist()}}}'
    assert answer("leaks", "served/1", "--rule", CAUSAL, "--inputs", tokens).startswith("No leaks.")
    only_itself = '{"kind": "window", "before": 0, "after": 0}'
    answer("leaks", "served/1", "--rule", only_itself, "--inputs", tokens, code=1)
