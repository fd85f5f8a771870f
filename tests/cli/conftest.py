"""Files to run commands on."""

import json
import shutil
import sys

import keras
import pytest
from calling import CAUSAL, RULE
from small_models import one_layer

import keras_headmask as hm

OWN = """
from dataclasses import dataclass
import keras_headmask as hm

print("words of a module")

@hm.register_spec("nearer_than")
@dataclass(frozen=True)
class NearerThan(hm.MaskSpec):
    "Keys nearer than `distance`."
    distance: int

    def allowed(self, query_positions, key_positions, inputs):
        print("evaluated")
        return abs(query_positions - key_positions) < self.distance
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "rule.json").write_text(json.dumps(RULE.get_config()))
    (folder / "causal.json").write_text(CAUSAL)
    (folder / "own.json").write_text('{"kind": "nearer_than", "distance": 2}')
    (folder / "own_specs.py").write_text(OWN)
    (folder / "inputs.json").write_text('{"token_ids": [[5, 9, 4, 6], [9, 1, 9, 1]]}')
    (folder / "tokens.json").write_text('["yes", ".", "no", "no"]')
    (folder / "bad.json").write_text('{"kind": "window",\n "before": 1,,}')
    (folder / "twice.json").write_text('{"kind": "window", "after": 0, "after": 1}')
    (folder / "bytes.json").write_bytes(b'{"kind": "\xff"}')
    (folder / "empty.json").write_text("\n")
    (folder / "text.keras").write_text("no model")
    (folder / "folder").mkdir()
    model = one_layer()
    model.save(folder / "model.keras")
    hm.apply_head_masks(model, RULE).save(folder / "masked.keras")
    keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x)]).save(
        folder / "lambda.keras"
    )
    return folder


@pytest.fixture(autouse=True)
def here(files, tmp_path, monkeypatch):
    """A folder of its own with the files in it, to be in."""
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # --import adds to it
    return folder
