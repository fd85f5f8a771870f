"""Small models of each kind that `export_saved_model` takes, and how their exports are asked."""

import contextlib
import functools
import subprocess
import sys
import types

import keras
import numpy as np
from keras import layers

import keras_headmask as hm
from keras_headmask.export import checking, fresh_process

FULL_STOP = 9
RULE = hm.PerHead({0: hm.SameSentence(FULL_STOP), 1: hm.Window(2, 1)})


def blocks(x, attend, count=1):
    for _ in range(count):
        x = layers.Add()([x, attend(layers.LayerNormalization()(x))])
        x = layers.Add()([x, layers.Dense(8, activation="gelu")(x)])
    return x


def ours(rule=RULE, tiled=False, count=1):
    """Functional, of our layers. (Tiles make large graphs: the tests of them ask for them.)"""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    read = {"token_ids": ids} if rule is not None and rule.inputs else None

    def attend(x):
        layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=rule, tiled=tiled)
        return layer(x, mask_inputs=read)

    return keras.Model(ids, blocks(layers.Embedding(30, 8)(ids), attend, count))


def stock(with_padding=True):
    """Functional, of stock layers; two inputs and two outputs by name."""
    inputs = {"token_ids": keras.Input((None,), dtype="int32", name="token_ids")}
    mask = None
    if with_padding:
        inputs["padding_mask"] = keras.Input((None,), dtype="int32", name="padding_mask")
        mask = inputs["padding_mask"][:, None, :]

    def attend(x):
        return layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask)

    x = blocks(layers.Embedding(30, 8)(inputs["token_ids"]), attend)
    return keras.Model(inputs, {"sequence": x, "first": x[:, 0] if with_padding else x})


def masked(rule=RULE, with_padding=True):
    return hm.apply_head_masks(stock(with_padding), rule)


class Subclassed(keras.Model):
    """A model whose second argument Keras' own export drops."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(30, 8)
        self.attention = hm.PerHeadMaskedMultiHeadAttention(
            2, 4, mask_spec=hm.PerHead({0: hm.SameSegment("segments")}), tiled=False
        )

    def call(self, token_ids, segments=None):
        mask_inputs = {"segments": token_ids * 0 if segments is None else segments}
        return self.attention(self.embedding(token_ids), mask_inputs=mask_inputs)


def tokens(batch, length, seed=0):
    ids = np.random.default_rng(seed).integers(1, 30, (batch, length)).astype("int32")
    ids[:, 2::4] = FULL_STOP
    return ids


def served(report, **inputs):
    """What the export answers in this process."""
    function = load(report.path).signatures["serving_default"]
    return {k: v.numpy() for k, v in function(**inputs).items()}


@functools.lru_cache(maxsize=1)
def load(path):
    import tensorflow as tf

    return tf.saved_model.load(str(path))


@contextlib.contextmanager
def server(path):
    """Ask the signatures of a version as TensorFlow Serving does: it looks at no shape."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2

    with contextlib.closing(tf.compat.v1.Session(graph=tf.Graph())) as session:
        with session.graph.as_default():
            meta = tf.compat.v1.saved_model.load(session, ["serve"], str(path))

        @functools.cache
        def run(signature, names):
            of = meta.signature_def[signature]
            feed = [of.inputs[name].name for name in names]
            fetch = [of.outputs[name].name for name in of.outputs]
            options = config_pb2.CallableOptions(feed=feed, fetch=fetch)
            return session._make_callable_from_options(options)  # `session.run` looks at shapes

        def ask(signature, **inputs):
            answers = run(signature, tuple(inputs))(*inputs.values())
            return dict(zip(meta.signature_def[signature].outputs, answers, strict=True))

        yield ask


def check_in_this_process(monkeypatch):
    """Run the script of the check here: a process of its own takes seconds to start."""

    def run(command, **_):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "keras_headmask", hm)  # put back afterwards
            fresh_process.main(*command[3:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(checking, "subprocess", types.SimpleNamespace(run=run))


def nothing_in(folder):
    return not folder.exists() or not any(folder.iterdir())


def over(*more):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(30, 8)(ids)
    for layer in more:
        x = layer(x)
    return keras.Model(ids, x)
