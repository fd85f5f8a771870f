import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# JAX compiles more than it runs here.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras
import pytest
from keras.src.backend.common import global_state

collect_ignore_glob = ["*conftest.py"]  # no tests; `--doctest-modules` would import all as one name


def pytest_addoption(parser):
    parser.addoption(
        "--tiled", action="store_true", help="take the tiled way whenever it can be, in tiny tiles"
    )


def pytest_configure(config):
    if config.getoption("--tiled"):
        from keras_headmask.attention import tiled_python, tiling

        tiling._SMALLEST, tiling._LARGEST_SHARE, tiling._SHORT = 0, 1.0, 0
        tiling._LOCAL_TILE, tiling._WIDE_TILE = 2, 3
        tiled_python._BLOCK = 2
        if keras.backend.backend() == "tensorflow":
            from keras_headmask.attention import tile_ranges

            tile_ranges._BLOCK = 2
            tile_ranges._LARGEST_SHARE = 2


def pytest_collection_modifyitems(items):
    backend = keras.backend.backend()
    skip = pytest.mark.skip(reason=f"needs the TensorFlow backend; this run is on {backend}")
    for item in items:
        if backend != "tensorflow" and item.get_closest_marker("tensorflow"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_weights_every_run():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _nothing_left_of_a_call():
    """A call that Keras did not end would make later ones train: see `Layer._get_call_context`."""
    yield
    left = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", None)
    assert left is None, f"the call of {left.entry_layer} was not ended"


@pytest.fixture
def dtype_policy(request):
    """A global dtype policy, put back afterwards."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.fixture(params=["by tiles", "head by head"])
def tiny(request):
    """The tiled way in so small steps that short sequences have several."""
    from tiled_contract import heads_alone, tiles

    if request.param == "head by head" and keras.backend.backend() != "tensorflow":
        pytest.skip("only TensorFlow goes head by head")
    with tiles() if request.param == "by tiles" else heads_alone():
        yield
