"""Exports for all serving tests of a process, and the server that is asked."""

import os

import keras
import pytest
import serving_model
from running_server import Endpoint, running

KINDS = ("none", "batching", "padding")


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """`{scale: folder}`: two SavedModels that differ by a factor, to be copied as versions."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("SavedModels are written on the TensorFlow backend")
    folder = tmp_path_factory.mktemp("exports")
    for scale in (1, 2):
        serving_model.export(serving_model.build(scale), folder / str(scale))
    return {1: folder / "1", 2: folder / "2"}


@pytest.fixture(scope="session")
def models():
    return {scale: serving_model.build(scale) for scale in (1, 2)}


@pytest.fixture(scope="session")
def endpoint(request):
    """The server at `TF_SERVING_URL`, of the kind `TF_SERVING_BATCHING`, else the own one."""
    if url := os.environ.get("TF_SERVING_URL"):
        kind = os.environ.get("TF_SERVING_BATCHING")
        if kind not in KINDS:
            raise ValueError(
                f"TF_SERVING_BATCHING must be one of {KINDS}, how the server at TF_SERVING_URL "
                f"merges requests. Received: {kind!r}. Set it beside TF_SERVING_URL."
            )
        model = os.environ.get("TF_SERVING_MODEL", "tiny")
        return Endpoint(f"{url.rstrip('/')}/v1/models/{model}", kind)
    return request.getfixturevalue("ours")


@pytest.fixture(scope="session")
def ours(exports, tmp_path_factory):
    """The own server, one for all tests that leave it as it is."""
    pytest.importorskip("kserve", reason='needs `pip install -e ".[server]"`')
    from keras_headmask.server.served_versions import ServedVersions

    base = tmp_path_factory.mktemp("base")
    serving_model.publish(exports[1], base, 1)
    with running(ServedVersions(base, report=lambda _: None)) as found:
        yield found
