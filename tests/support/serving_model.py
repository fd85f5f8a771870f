"""The tiny model that servers are asked for: written as versions, and computed for comparison."""

import os
import pathlib
import shutil

import keras
import numpy as np

import keras_headmask as hm

WIDTH = 8


def build(scale=1.0):
    """Three inputs of three dtypes, two outputs; `scale` tells versions apart."""
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    padding_mask = keras.Input((None,), dtype="bool", name="padding_mask")
    x = keras.Input((None, WIDTH), name="x")
    y = hm.PerHeadMaskedMultiHeadAttention(
        num_heads=2,
        key_dim=4,
        mask_spec=hm.PerHead({0: hm.SameSegment("token_ids")}),
        tiled=False,  # a smaller graph, quicker to load
    )(
        x,
        attention_mask=keras.ops.expand_dims(padding_mask, 1),
        mask_inputs={"token_ids": token_ids},
    )
    y = y * scale
    model = keras.Model([token_ids, padding_mask, x], {"y": y, "first": y[:, 0]})
    rng = np.random.default_rng(0)  # the same weights whatever the versions of Keras
    model.set_weights([rng.normal(size=w.shape).astype("float32") for w in model.weights])
    return model


def export(model, folder):
    """A SavedModel: all inputs by name; with `lengths`; one input, one output."""
    import tensorflow as tf

    ids = tf.TensorSpec((None, None), "int32", name="token_ids")
    mask = tf.TensorSpec((None, None), "bool", name="padding_mask")
    x = tf.TensorSpec((None, None, WIDTH), "float32", name="x")
    lengths = tf.TensorSpec((None,), "int32", name="lengths")

    def serving_default(token_ids, padding_mask, x):
        return model([token_ids, padding_mask, x])

    def serve_padded(token_ids, padding_mask, x, lengths):
        real = tf.sequence_mask(lengths, tf.shape(token_ids)[1])
        y = model([token_ids, padding_mask & real, x])["y"]
        return {"y": tf.where(real[..., None], y, 0.0)}

    def double(token_ids):
        return {"doubled": 2 * token_ids}

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serving_default", serving_default, input_signature=[ids, mask, x])
    archive.add_endpoint("serve_padded", serve_padded, input_signature=[ids, mask, x, lengths])
    archive.add_endpoint("double", double, input_signature=[ids])
    archive.write_out(str(folder), verbose=False)


def publish(source, base, version):
    """A copy of `source` as a version: under a name servers pass over first, then renamed."""
    temporary = pathlib.Path(base) / f".{version}.tmp"
    shutil.copytree(source, temporary)
    os.rename(temporary, pathlib.Path(base) / str(version))


def example(batch=2, length=3, seed=0):
    """Inputs by name; the first position is never padding."""
    rng = np.random.default_rng(seed)
    padding_mask = rng.random((batch, length)) < 0.7
    padding_mask[:, 0] = True
    return {
        "token_ids": rng.integers(0, 2, (batch, length)).astype("int32"),
        "padding_mask": padding_mask,
        "x": rng.normal(size=(batch, length, WIDTH)).astype("float32"),
    }


def as_json(arrays):
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}


def as_rows(arrays):
    columns = as_json(arrays)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
