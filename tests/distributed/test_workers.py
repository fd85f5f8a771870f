"""Training on several workers or devices gives the weights of training on one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_on_workers.py"
HERE = Path(__file__).parent
SECONDS = 300  # a run takes 20; a hang must not take the day
pytestmark = pytest.mark.tensorflow


def run(script, *arguments, backend="tensorflow"):
    """Return code and what was printed; no process stays, whatever happens."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": path},
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
    return process.returncode, printed


def still_running(group):
    """Kill what runs in the process group, and return whether anything did."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("orbax.checkpoint")
    code, printed = run(EXAMPLE, "--quick", "--kill", "--out", tmp_path, backend="jax")
    assert code == 0, printed
    # (Worker 0, which lost its peer, may have ended, too, before anybody looks.)
    assert re.search(rf"Workers ended with \[.*(-?\d+|None), ({-signal.SIGKILL}|None)\]", printed)
    _, _, again = printed.partition("Starting all again.")
    resumed, _, alone = again.partition("Training in one process.")
    assert "Epoch 1/4" not in resumed  # it is in the checkpoint
    assert "Epoch 2/4" in resumed
    assert "Epoch 1/4" in alone
    apart = re.search(r"^2 workers and one process differ by up to (\S+)\.$", printed, re.M)
    assert float(apart[1]) <= 1e-5


@pytest.mark.long
def test_two_mirrored_devices_end_with_the_weights_of_one():
    code, printed = run(HERE / "mirrored.py")
    assert code == 0, printed
    rows = re.findall(r"^(\w+) 2 (\S+) (\S+)$", printed, re.M)
    assert [name for name, *_ in rows] == ["built_with_the_layer", "by_apply_head_masks"], printed
    for name, moved, apart in rows:
        assert float(moved) > 1e-2, name
        assert float(apart) <= 1e-5, name


WORKERS_SHARE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import train_on_workers as example

rows = {"token_ids": np.arange(60)[:, None] * np.ones(9, int)}
shards = [example.Shard(rows, 12, 5, worker, 3) for worker in range(3)]
alone = example.Shard(rows, 12, 5, 0, 1)
for each in (*shards, alone):
    each.epoch = 7
for step in range(5):
    theirs = np.concatenate([each[step][1][:, 0] for each in shards])
    assert sorted(theirs) == sorted(alone[step][1][:, 0])
assert len(np.unique([alone[step][1][:, 0] for step in range(5)])) == 60
example.Shard(rows, 32, 1, 0, 3)
"""


def test_workers_share_each_batch():
    pytest.importorskip("jax")
    command = [sys.executable, "-c", WORKERS_SHARE, EXAMPLE.parent]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "ValueError: A batch of 32 rows does not divide over 3 workers." in done.stderr
