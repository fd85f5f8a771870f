"""Heads over several devices, on JAX: the same answers, and little is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow  # the programs choose their backend
HERE = Path(__file__).parent
PATHS = HERE.parents[1], HERE.parent / "support"


def on_eight_devices(name):
    """What `name` of `on_devices.py` finds, in a process with eight virtual devices."""
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    run = subprocess.run(
        [sys.executable, HERE / "on_devices.py", name],
        env=os.environ
        | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    return said["pairs"], said["facts"]


@pytest.mark.long  # (20 seconds and more)
@pytest.mark.parametrize("name", ["layer", "tiles"])
def test_heads_on_devices(name):
    """What one device computes is held by the laws."""
    pairs, facts = on_eight_devices(name)
    assert facts["outputs"] < 1e-5
    assert facts["gradients"] < 1e-5
    assert facts["heads of a device"] == [2] * 8
    # One sum over devices joins the heads, and gradients are summed; nothing else is sent.
    assert set(facts["sent"]) == {"all-reduce"}
    assert facts["sent"]["all-reduce"] < pairs
