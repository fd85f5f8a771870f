import collections
import ctypes
import gc
import json
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# JAX compiles more than it runs here.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest

# (Keras is imported by who needs it: the process that gives tests to workers does not.)
BACKEND = os.environ["KERAS_BACKEND"]
# No tests. `--doctest-modules` would import all of the first as one name, and run the second, which
# tests start in processes of their own.
collect_ignore_glob = ["*conftest.py", "distributed/[!t]*.py"]


def pytest_addoption(parser):
    parser.addoption("--part", choices=["daily", "rest"], help="what `make test` runs, or the rest")
    parser.addoption(
        "--write-seconds", action="store_true", help="into tests/seconds.json, for --part"
    )


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason=f"needs the TensorFlow backend; this run is on {BACKEND}")
    for item in items:
        if BACKEND != "tensorflow" and item.get_closest_marker("tensorflow"):
            item.add_marker(skip)
    if part := config.getoption("--part"):
        chosen = daily(item for item in items if not item.get_closest_marker("long"))
        left_out = {item for item in items if (item in chosen) != (part == "daily")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    # The longest first: begun last, one would run alone for a minute.
    items.sort(key=lambda item: -_seconds(item) // 10)


# --- What `make test` runs ------------------------------------------------------------------------

SECONDS = Path(__file__).with_name("seconds.json")  # of one core, as `make test-all` measured them
OF_THIS = json.loads(SECONDS.read_text()).get(BACKEND, {})  # by file, then by case
LEAST = 0.05  # what takes less, or is not known, counts as half of it
SKIPPED = 1000  # what is skipped here, which is not to be among the cheapest


def _seconds(item):
    file, _, name = item.nodeid.partition("::")
    return OF_THIS.get(file, {}).get(name, LEAST / 2)


def daily(items):
    """Of each function the cheapest cases that fit in a second, at least one if it takes at most 3.

    Cheapest first leaves whole kernels out, since some always trace: so of each route to a kernel
    its ten cheapest laws too, if each takes at most 3.
    """
    items = sorted(items, key=_seconds)
    functions, routes = collections.defaultdict(list), collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "kernel" in params:
            routes[str(params["kernel"])].append(item)
    chosen = {item for laws in routes.values() for item in laws[:10]}
    for cases in functions.values():
        chosen.add(cases[0])
        spent = 0.0
        for item in cases:
            if (spent := spent + _seconds(item)) <= 1:
                chosen.add(item)
    return {x for x in items if (x in chosen and _seconds(x) <= 3) or x.get_closest_marker("daily")}


took, skipped = {}, set()  # the seconds of each case, setup included


def _cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.begun = _cpu_seconds()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "teardown":
        seconds = _cpu_seconds() - item.begun
        outcome.get_result().user_properties.append(("seconds", seconds))


def pytest_runtest_logreport(report):
    if report.skipped:
        skipped.add(report.nodeid)
    if report.when == "teardown":
        took[report.nodeid] = dict(report.user_properties).get("seconds", 0.0)


def _write_seconds():
    """Those of this run's files anew, cases below `LEAST` left out."""
    by_file = collections.defaultdict(dict)
    for nodeid, seconds in sorted(took.items()):
        file, _, name = nodeid.partition("::")
        seconds = SKIPPED if nodeid in skipped else seconds
        by_file[file] |= {name: round(seconds, 2)} if seconds >= LEAST else {}
    files = {
        x: known for x, known in (OF_THIS | by_file).items() if (SECONDS.parents[1] / x).exists()
    }
    known = json.loads(SECONDS.read_text()) | {BACKEND: dict(sorted(files.items()))}
    SECONDS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _say_what_took_long(write_line):
    """A report, and no failure: the machine may be busy."""
    ran = took.keys() - skipped
    expected = {x: OF_THIS.get(x.partition("::")[0], {}).get(x.partition("::")[2], 0) for x in ran}
    spent, budget = sum(took.values()), sum(expected.values())
    write_line(f"{spent:.0f} CPU seconds in {len(took)} cases; {budget:.0f} were expected")
    if OF_THIS and spent > 1.5 * budget:
        for case in sorted(ran, key=lambda x: expected[x] - took[x])[:15]:
            write_line(f"  {took[case]:.1f} in place of {expected[case]:.1f}: {case}")


def pytest_sessionfinish(session):
    if session.config.getoption("--write-seconds") and not hasattr(session.config, "workeroutput"):
        _write_seconds()


def pytest_terminal_summary(terminalreporter):
    _say_what_took_long(terminalreporter.write_line)


# --- What is freed goes back ---------------------------------------------------------------------

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)  # glibc alone has it


def pytest_collection_finish():
    _out_of_the_collectors_sight()


@pytest.fixture(autouse=True, scope="module")
def _collected_once():
    yield
    if BACKEND == "jax":
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
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _nothing_left_of_a_call():
    """A call that Keras did not end would make later ones train: see `Layer._get_call_context`."""
    from keras.src.backend.common import global_state

    yield
    left = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", None)
    assert left is None, f"the call of {left.entry_layer} was not ended"


@pytest.fixture
def dtype_policy(request):
    """A global dtype policy, put back afterwards."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)
