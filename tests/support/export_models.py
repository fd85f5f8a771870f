"""A small model for exports, and how exports are asked."""

import functools
import subprocess
import sys
import types

import keras
import numpy as np
from keras import layers

import keras_headmask as hm
from keras_headmask.export import checking, fresh_process

RULE = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(2, 1)})


def both(tiled=False, length=None):
    """A layer of ours and one of stock, under a rule; two inputs and two outputs by name."""
    ids = keras.Input((length,), dtype="int32", name="token_ids")
    x = layers.Embedding(30, 8)(ids)
    ours = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=RULE, tiled=tiled)
    x = layers.Add()([x, ours(x, mask_inputs={"token_ids": ids})])
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, name="stock")(x, x)])
    model = keras.Model({"token_ids": ids}, {"sequence": x, "first": x[:, 0]})
    rule = RULE & hm.KeyFlag("padding_mask")
    return hm.apply_head_masks(model, rule, layers="stock", add_inputs=True)


def tokens(batch, length):
    """A full stop at each fourth position, from the third on."""
    ids = np.random.default_rng(0).integers(10, 30, (batch, length)).astype("int32")
    ids[:, 2::4] = 9
    return ids


def inputs_of_both(batch, length):
    """With a padding mask: each example has one real token fewer than the one before."""
    real = np.arange(length) < np.maximum(1, length - np.arange(batch)[:, None])
    return {"token_ids": tokens(batch, length), "padding_mask": real}


@functools.lru_cache(maxsize=1)
def load(path):
    import tensorflow as tf

    return tf.saved_model.load(str(path))


def served(report, inputs):
    """What a version answers in this process."""
    answers = load(report.path).signatures["serving_default"](**inputs)
    return {name: x.numpy() for name, x in answers.items()}


def check_in_this_process(monkeypatch):
    """Run the script of the check here: a process of its own takes seconds to start."""

    def run(command, **_):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "keras_headmask", hm)  # put back afterwards
            fresh_process.main(*command[3:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(checking, "subprocess", types.SimpleNamespace(run=run))
