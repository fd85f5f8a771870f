"""How many files of the package a reader goes through, to follow what one public call does."""

import collections
import sys
from pathlib import Path

import pytest
from small_models import TOKENS, stack

import keras_headmask as hm
from keras_headmask.retrofit.find import Found

pytestmark = pytest.mark.tensorflow  # (one backend is enough)
PACKAGE = str(Path(hm.__file__).parent)
RULE = hm.PerHead({0: hm.SameSentence(9)}, default=hm.Window(2, 2))


def entered(call):
    """The files of the package whose code runs in `call()`, and how often each function of it."""
    files, calls = set(), collections.Counter()

    def see(frame, event, argument):
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            files.add(file.removeprefix(PACKAGE))
            calls[frame.f_code] += event == "call"

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, calls


# The most files. A number may be lowered; a commit that raises one says what it could not avoid.
MOST = {
    "apply_head_masks": 12,
    "a masked call": 16,
    "attention_probabilities": 18,
    "export_saved_model": 23,
}


@pytest.mark.parametrize("walk", MOST)
def test_a_walk_is_short(walk, tmp_path):
    masked = hm.apply_head_masks(stack(2), RULE, ignore="")
    stock = stack(2)
    masked(TOKENS)
    probabilities, export = hm.attention_probabilities, hm.export_saved_model  # imports them
    run = {
        "apply_head_masks": lambda: hm.apply_head_masks(stock, RULE, ignore=""),
        "a masked call": lambda: masked(TOKENS),
        "attention_probabilities": lambda: probabilities(masked, TOKENS),
        "export_saved_model": lambda: export(masked, tmp_path, check=False),
    }[walk]
    files, calls = entered(run)
    assert len(files) <= MOST[walk], sorted(files)
    is_call = walk == "a masked call"
    assert calls[Found.__init__.__code__] == (not is_call)  # one look, and none in a call
    assert calls[hm.SameSentence.prepare.__code__] == 1 or not is_call  # for both layers
