import ctypes
import gc
import os
import re
import resource

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# JAX compiles more than it runs here.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras
import pytest
from keras.src.backend.common import global_state

# No tests. `--doctest-modules` would import all of the first as one name, and run the second, which
# tests start in processes of their own.
collect_ignore_glob = ["*conftest.py", "distributed/[!t]*.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--tiled", action="store_true", help="compute tiles wherever that is possible, tiny ones"
    )


def pytest_configure(config):
    if config.getoption("--tiled"):
        from tiled_contract import ALWAYS

        from keras_headmask.attention.tuning import tuned

        tiny = tuned(**ALWAYS, local_tile=2, wide_tile=3, block=2)
        tiny.__enter__()
        config.add_cleanup(lambda: tiny.__exit__(None, None, None))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items):
    for item in items:
        cases = item.get_closest_marker("every_day")
        if cases and not all(re.search(words, item.callspec.id) for words in cases.args):
            item.add_marker(pytest.mark.long)
    backend = keras.backend.backend()
    skip = pytest.mark.skip(reason=f"needs the TensorFlow backend; this run is on {backend}")
    for item in items:
        if backend != "tensorflow" and item.get_closest_marker("tensorflow"):
            item.add_marker(skip)
    # The longest first: begun last, one would run alone for a minute.
    items.sort(key=lambda item: item.path.name != "test_examples.py")


# --- A run is not to need more memory than a small machine has ---------------------------------

MOST_OF_A_WORKER = 4.0  # GiB
peaks = {}  # of the workers' memory, in GiB
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)  # glibc alone has it


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    peaks[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak", 0)


def pytest_sessionfinish(session):
    """Note what this process held at most, and fail the run if a worker held too much."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = _peak()
    elif max(peaks.values(), default=0) > MOST_OF_A_WORKER:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for worker, peak in sorted(peaks.items()):
        too_much = f": more than {MOST_OF_A_WORKER:g} GiB" if peak > MOST_OF_A_WORKER else ""
        terminalreporter.write_line(f"memory of {worker}: {peak:.1f} GiB at most{too_much}")


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB


def pytest_collection_finish():
    _out_of_the_collectors_sight()


@pytest.fixture(autouse=True, scope="module")
def _collected_once():
    yield
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()  # all that was compiled stays there
    _malloc_trim(0)
    _out_of_the_collectors_sight()


@pytest.fixture(autouse=True)
def _freed_memory_goes_back(request):
    """Without this a process keeps what was freed: 1 to 2 GiB after large models."""
    yield
    if request.node.get_closest_marker("long"):
        gc.collect()
        _malloc_trim(0)


def _out_of_the_collectors_sight():
    """`apply_head_masks` looks through all objects. All that stays would double the tests' time."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(params=["by tiles", "all logits"])
def tiny(request):
    """Tiles so small that short sequences have several, or all logits of long ones."""
    from tiled_contract import at_once, tiles

    if request.param == "all logits" and keras.backend.backend() != "tensorflow":
        pytest.skip("only TensorFlow has a choice")
    with tiles() if request.param == "by tiles" else at_once():
        yield
