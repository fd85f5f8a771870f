"""On several workers or devices, answers and weights are those of one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_on_workers.py"
SECONDS = 300  # a run takes 20; a hang must not take the day
pytestmark = [pytest.mark.tensorflow, pytest.mark.long]  # the programs choose their backend


def run(script, *arguments, **environment):
    """What was printed; no process stays, whatever happens."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the workers, too
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        left = still_running(process.pid)
        process.wait()
    assert not left, "a worker was left running"
    assert process.returncode == 0, printed
    return printed


def still_running(group):
    """Kill what runs in the process group, and return whether anything did."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def test_heads_on_devices():
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    on_cpu = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run(Path(__file__).with_name("on_devices.py"), KERAS_BACKEND="jax", **on_cpu)


def test_two_mirrored_devices_end_with_the_weights_of_one():
    run(Path(__file__).with_name("mirrored.py"), KERAS_BACKEND="tensorflow")


def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("orbax.checkpoint")
    printed = run(EXAMPLE, "--quick", "--kill", "--out", tmp_path, KERAS_BACKEND="jax")
    # (Worker 0, which lost its peer, may have ended, too, before anybody looks.)
    assert re.search(rf"Workers ended with \[.*(-?\d+|None), ({-signal.SIGKILL}|None)\]", printed)
    _, _, again = printed.partition("Starting all again.")
    resumed, _, alone = again.partition("Training in one process.")
    assert "Epoch 1/4" not in resumed  # it is in the checkpoint
    assert "Epoch 2/4" in resumed
    assert "Epoch 1/4" in alone
    apart = re.search(r"^2 workers and one process differ by up to (\S+)\.$", printed, re.M)
    assert float(apart[1]) <= 1e-5
