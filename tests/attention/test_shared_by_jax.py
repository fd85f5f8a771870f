"""JAX computes equal expressions once: the mask of all layers, too."""

import collections
import re

import keras
import numpy as np
import pytest
from keras import layers

import keras_headmask as hm

if keras.backend.backend() != "jax":
    pytest.skip("what XLA does with a JAX model", allow_module_level=True)

import jax


def compiled(count):
    """The program of a stack of so many stock layers under a rule, 2 x 16 tokens."""
    ids = keras.Input((16,), batch_size=2, dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    for _ in range(count):
        x = layers.Add()([x, layers.MultiHeadAttention(3, 4)(x, x)])
    model = hm.apply_head_masks(keras.Model(ids, x), hm.PerHead({0: hm.SameSentence(9)}))
    weights, state = (
        [variable.value for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    call = jax.jit(lambda *given: model.stateless_call(*given)[0])
    return call.lower(weights, state, np.ones((2, 16), "int32")).compile().as_text()


def of_masks(program):
    """Comparisons of integers (of ids and positions alone), and what is joined of whole masks."""
    types = dict(re.findall(r"(%?[\w.\-]+) = ([a-z]+\d*)\[", program))
    count = collections.Counter()
    for shape, operation, first in re.findall(
        r"= (pred\[[\d,]*\])\S* (compare|and)\((?:\S+ )?(%?[\w.\-]+)", program
    ):
        if types[first] == "s32" or shape == "pred[2,1,16,16]":
            count[operation, shape] += 1
    return count


def test_a_program_of_four_layers_makes_the_mask_of_one():
    one, four = (of_masks(compiled(count)) for count in (1, 4))
    assert four == one
    assert one["compare", "pred[2,1,16,16]"] == 1
    assert one["and", "pred[2,1,16,16]"] > 0
