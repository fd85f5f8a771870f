"""Training on several workers or devices gives the weights of training on one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "train_on_workers.py"
HERE = Path(__file__).parent
SECONDS = 300  # a run takes 20; a hang must not take the day
pytestmark = pytest.mark.tensorflow


def run(script, *arguments, backend="tensorflow"):
    """Return code and what was printed; no process stays, whatever happens."""
    path = [ROOT, EXAMPLES, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        env=environment,
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


def differences(printed):
    moved = re.search(r"^Training moved a weight by up to (\S+)\.$", printed, re.M)
    apart = re.search(r"^2 workers and one process differ by up to (\S+)\.$", printed, re.M)
    assert moved, printed
    return float(moved[1]), float(apart[1])


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(backend, tmp_path):
    pytest.importorskip(backend)
    code, printed = run(EXAMPLE, "--quick", "--kill", "--out", tmp_path, backend=backend)
    assert code == 0, printed
    # (Worker 0, which lost its peer, may have ended, too, before anybody looks.)
    ended = (
        rf"Worker (1 ended with {-signal.SIGKILL}|0 ended with -?\d+); the others were stopped\."
    )
    assert re.search(ended, printed), printed
    _, _, again = printed.partition("Starting all again.")
    resumed, _, alone = again.partition("Training in one process.")
    assert "Epoch 1/4" not in resumed  # it is in the checkpoint
    assert "Epoch 2/4" in resumed
    assert "Epoch 1/4" in alone
    moved, apart = differences(printed)
    assert moved > 1e-3
    assert apart <= 1e-5


@pytest.mark.long
def test_two_mirrored_devices_end_with_the_weights_of_one():
    code, printed = run(HERE / "mirrored.py")
    assert code == 0, printed
    rows = re.findall(r"^(\w+) 2 (\S+) (\S+)$", printed, re.M)
    assert [name for name, *_ in rows] == ["built_with_the_layer", "by_apply_head_masks"], printed
    for name, moved, apart in rows:
        assert float(moved) > 1e-2, name
        assert float(apart) <= 1e-5, name


# --- Bad input ------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_on_workers

    return train_on_workers


def shard(example, batch, worker, workers):
    rows = {name: np.ones((60, 9), "int32") for name in ("token_ids", "paragraph_ids")}
    options = example.parse(["--batch", str(batch)])
    return example.Shard(rows, options, worker, workers)


def test_workers_share_each_batch(example):
    rows = {"token_ids": np.arange(60)[:, None] * np.ones(9, int)}
    options = example.parse(["--batch", "12"])
    shards = [example.Shard(rows, options, worker, 3) for worker in range(3)]
    for each in shards:
        each.start_epoch(5)
    alone = example.Shard(rows, options, 0, 1)
    alone.start_epoch(5)
    for step in range(len(alone)):
        theirs = np.concatenate([each[step][1][:, 0] for each in shards])
        assert sorted(theirs) == sorted(alone[step][1][:, 0])
    assert len(np.unique([alone[step][1][:, 0] for step in range(5)])) == 60


def test_a_checkpoint_of_other_steps(example, tmp_path):
    options = example.parse(["--quick", "--out", str(tmp_path)])
    model = example.build_model(example.make_rule(1), blocks=1)
    model.optimizer.build(model.trainable_variables)
    writer = example.WeightsFile(example.checkpoint(options))
    writer.set_model(model)
    model.optimizer.iterations.assign(7)
    writer.on_epoch_end(0)
    five_steps = shard(example, 12, worker=0, workers=1)
    with pytest.raises(ValueError, match=r"after 7 steps, .* no whole epochs of 5\. Train with"):
        example.resume(example.build_model(example.make_rule(1), blocks=1), five_steps, options)
    model.optimizer.iterations.assign(10)
    writer.on_epoch_end(1)
    assert example.resume(model, five_steps, options) == 2


def test_a_kill_while_a_checkpoint_is_written_leaves_the_last(example, tmp_path):
    class Model:
        def save_weights(self, file):
            file.write_text("half")
            raise KeyboardInterrupt

    (tmp_path / "checkpoint").write_text("whole")
    writer = example.WeightsFile(tmp_path / "checkpoint")
    writer.set_model(Model())
    with pytest.raises(KeyboardInterrupt):
        writer.on_epoch_end(0)
    assert (tmp_path / "checkpoint").read_text() == "whole"
