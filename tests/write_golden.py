"""Writes the golden files of this format version, once: `python tests/write_golden.py`.

A golden folder is never written again. When the format changes, raise `FORMAT_VERSION`, run this,
and commit the new folder beside the old ones, which every release must go on reading.
"""

import json
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from keras import layers

import keras_headmask as hm

FORMAT_VERSION = 1
GOLDEN = pathlib.Path(__file__).parents[1] / "saved_models" / "golden"
LENGTH, HEADS = 12, 3
# Every kind there is, alone or in company.
RULES = {
    "full": hm.Full(),
    "nothing in one head": hm.PerHead({1: hm.Nothing()}),
    "windows": hm.PerHead({0: hm.Window(2, 1), 1: hm.Window(after=0)}, default=hm.Window(4, 4, 2)),
    "chunks and positions": hm.Chunk(4) | hm.Keys(0, 2) & hm.Queries(3, 9) | hm.Chunk(2, 1, 0),
    "segments": ~hm.SameSegment("segments"),
    "sentences": hm.PerHead({"0-1": hm.SameSentence((9, 7))}),
    "flags": hm.KeyFlag("flags") | hm.QueryFlag("flags") & hm.Window(1, 1),
    "ids": hm.KeyIn("token_ids", 9) | hm.QueryIn("token_ids", (5, 9)),
    "a whole mask": hm.MaskInput("mask") & hm.Window(8, 8),
    "a recipe": hm.recipes.longformer(1, "flags"),
}


def mask_inputs():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 20, (2, LENGTH)).astype("int32")
    ids[:, 3::4] = 9
    return {
        "token_ids": ids,
        "segments": np.cumsum(rng.random((2, LENGTH)) < 0.3, -1).astype("int32") - 1,
        "flags": rng.random((2, LENGTH)) < 0.3,
        "mask": rng.random((2, HEADS, LENGTH, LENGTH)) < 0.6,
    }


def model():
    """A layer of ours and, under `apply_head_masks`, one of stock. (Short names: small graphs.)"""
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(20, 6, name="e")(ids)
    ours = hm.PerHeadMaskedMultiHeadAttention(
        HEADS, 2, mask_spec=hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(2, 1)}), name="a"
    )
    x = layers.Add(name="c")([x, ours(x, mask_inputs={"token_ids": ids})])
    x = layers.Add(name="d")([x, layers.MultiHeadAttention(HEADS, 2, name="b")(x, x)])
    return hm.apply_head_masks(keras.Model(ids, x, name="m"), hm.Window(1, 0), layers="b")


def main():
    folder = GOLDEN / f"format-{FORMAT_VERSION}"
    if folder.exists():
        sys.exit(f"{folder} exists, and golden files are never written again: see the docstring.")
    given, golden = mask_inputs(), model()
    folder.mkdir(parents=True)
    with hm.dense_scope():
        report = hm.export_saved_model(golden, folder / "saved_model")
    golden.save(folder / "model.keras")
    configs = {name: spec.get_config() for name, spec in RULES.items()}
    (folder / "rules.json").write_text(json.dumps(configs, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "mask_inputs.npz", **given)
    masks = {}
    for name, spec in RULES.items():
        read = {key: given[key] for key in spec.inputs}
        masks[name] = keras.ops.convert_to_numpy(hm.make_mask(spec, LENGTH, LENGTH, HEADS, read))
    np.savez_compressed(folder / "masks.npz", **masks)
    outputs = keras.ops.convert_to_numpy(golden(given["token_ids"]))
    np.savez_compressed(folder / "outputs.npz", output_0=outputs)
    print(report)


if __name__ == "__main__":
    main()
