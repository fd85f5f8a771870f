"""The loader that TensorFlow Serving uses, from C++: exports answer there as they do here."""

import os
import shutil

import cpp
import numpy as np
import pytest
from contract import numpy
from export_models import FULL_STOP, masked, ours, served, tokens
from tolerance import assert_close

import keras_headmask as hm

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]  # it compiles C++
SHAPES = [(1, 1), (2, 6), (5, 17), (1, 129), (2, 300)]


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    if reason := cpp.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    return cpp.build(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="module", params=["layers", "masked"])
def exported(request, tmp_path_factory):
    """The kind, the model and its export."""
    model = ours(tiled=None) if request.param == "layers" else masked()
    folder = tmp_path_factory.mktemp("exported")
    return request.param, model, hm.export_saved_model(model, folder, check=False)


def test_answers_are_those_of_python_at_any_shape(loader, exported):
    kind, model, report = exported
    wanted, requests = [], []
    for shape in SHAPES:
        inputs = {"token_ids": tokens(*shape)}
        if kind == "masked":
            inputs["padding_mask"] = (np.arange(shape[1]) < max(1, shape[1] - 3))[None].repeat(
                shape[0], 0
            )
        inputs = {name: value.astype("int32") for name, value in inputs.items()}
        requests.append(("serving_default", inputs))
        wanted.append(model(inputs if kind == "masked" else inputs["token_ids"]))
    answers = cpp.run(loader, report.path, requests)
    for i, (_, inputs) in enumerate(requests):
        here = served(report, **inputs)
        assert answers[i].keys() == here.keys()
        in_memory = wanted[i]
        in_memory = in_memory if isinstance(in_memory, dict) else {"output_0": in_memory}
        for output, value in here.items():
            label = f"{output} {SHAPES[i]}"
            assert_close(answers[i][output], value, message=label)
            assert_close(answers[i][output], numpy(in_memory[output]), message=label, depth=3)


@pytest.mark.parametrize("exported", ["layers"], indirect=True)
def test_the_rule_holds_there_and_bad_requests_are_errors(loader, exported):
    _, _, report = exported
    ids = tokens(2, 12)
    other = ids.copy()
    other[:, 0] = np.where(ids[:, 0] == 5, 6, 5)  # a word of the first sentence, which ends at 2
    bad = {
        "a wrong dtype": {"token_ids": ids.astype("float32")},
        "a wrong rank": {"token_ids": ids[0]},
        "another wrong rank": {"token_ids": ids[..., None]},
        "an input missing": {},
    }
    requests = [("serving_default", {"token_ids": x}) for x in (ids, other)]
    requests += [("serving_default", inputs) for inputs in bad.values()]
    requests += [("no such signature", {"token_ids": ids})]
    good, changed, *errors = cpp.run(loader, report.path, requests)
    for error, name in zip(errors, [*bad, "no signature"], strict=True):
        assert isinstance(error, str), name
        assert error.startswith("INVALID_ARGUMENT\n"), f"{name}: {error}"
    assert_close(good["output_0"], served(report, token_ids=ids)["output_0"])

    assert (ids[:, 2] == FULL_STOP).all()
    apart = abs(good["output_0"] - changed["output_0"]).max(axis=(0, 2))
    assert apart[3:].max() < 1e-6  # later sentences, beyond the window of the other head
    assert apart[:3].max() > 1e-6


@pytest.mark.parametrize("exported", ["layers"], indirect=True)
def test_a_truncated_version_is_refused(loader, exported, tmp_path):
    version = tmp_path / "1"
    shutil.copytree(exported[2].path, version)
    (data,) = (version / "variables").glob("variables.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(RuntimeError, match=r"(?i)truncated|out_of_range|data_loss"):
        cpp.run(loader, version, [("serving_default", {"token_ids": tokens(1, 3)})])
