"""
# Train a masked model on several workers

A small language model learns Python's own help texts. Head 0 sees its own sentence, the others see
their own paragraph, none looks ahead. This script trains it in one process, then on two workers
(processes on this machine), each with its half of every batch, and prints how far the weights of
the two runs are apart. With `--kill` a worker is killed in mid-epoch. Both start again, go on from
the last checkpoint, and end with the same weights.

    pip install -e ".[beyond]"   # Orbax, which writes the checkpoints on JAX, is in it
    python examples/train_on_workers.py                  # 1 to 3 CPU minutes
    python examples/train_on_workers.py --kill           # 2 to 4 CPU minutes
    python examples/train_on_workers.py --quick          # 20 steps
    KERAS_BACKEND=tensorflow python examples/train_on_workers.py   # a loop in place of `fit`

On JAX (the default) the workers train by `fit` under `keras.distribution.DataParallel`. On
TensorFlow, `fit` of Keras 3.15 fails under `MultiWorkerMirroredStrategy`, so a short loop trains.

On a cluster, start this script once on each host, with three variables that Keras reads, and an
`--out` that all hosts see (the checkpoints lie there, and all read them):

    KERAS_DISTRIBUTION_JOB_ADDRESSES=host0:12345,host1:12345   # the same on each host
    KERAS_DISTRIBUTION_NUM_PROCESSES=2                         # the same on each host
    KERAS_DISTRIBUTION_PROCESS_ID=0                            # 0 on the first host, 1 on the next

docs/workers.md has the commands for Slurm, KubeRay and Vertex AI.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "jax")

from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers

import keras_headmask as hm

ADDRESSES, WORKERS, WORKER = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)
VOCABULARY_SIZE = 1000


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 steps, learns next to nothing")
    parser.add_argument("--kill", action="store_true", help="kill a worker in mid-epoch")
    for name, default, meaning in (
        ("workers", 2, "processes to start here"),
        ("batch", 32, "rows of a step, of all workers"),
        ("epochs", 4, None),
        ("steps", 20, "of an epoch, at most"),
        ("length", 64, "tokens of a row"),
        ("blocks", 2, "of attention and a feed-forward part"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=meaning)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/workers"))
    parser.add_argument("--die", action="store_true", help="what `--kill` adds for the last worker")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(batch=8, steps=5, length=16, blocks=1)
    options = parser.parse_args(arguments)
    if options.kill and options.epochs < 2:
        parser.error("--kill needs --epochs of 2 or more: it kills in the second")
    return options


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


# --- Data: each worker takes its rows of every batch ----------------------------------------------


def prose():
    """The paragraphs of Python's help texts, as lists of words and marks."""
    paragraphs = {}  # a dict for its keys: some paragraphs stand under several topics
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if line[:1].isupper() and line[-1:] == "." and "::=" not in line:
                paragraphs[line] = None
    return [re.findall(r"\w+|[^\w\s]", line.lower()) for line in paragraphs]


def read_rows(length):
    """`token_ids` and `paragraph_ids`, both `(rows, length + 1)`, and the id of the full stop."""
    paragraphs = prose()
    counted = collections.Counter(word for words in paragraphs for word in words)
    words = [word for word, _ in counted.most_common(VOCABULARY_SIZE - 1)]
    ids = {word: number for number, word in enumerate(words, 1)}  # 0: every other word
    tokens = [ids.get(word, 0) for words in paragraphs for word in words]
    of_paragraph = np.repeat(np.arange(len(paragraphs)), [len(words) for words in paragraphs])
    whole = len(tokens) // (length + 1) * (length + 1)  # the last words fill no row

    def in_rows(values):
        return np.array(values[:whole], "int32").reshape(-1, length + 1)

    return {"token_ids": in_rows(tokens), "paragraph_ids": in_rows(of_paragraph)}, ids["."]


class Shard(keras.utils.PyDataset):
    """A worker's rows of each batch, in an order that the number of the epoch alone decides.

    So all workers agree on the batches, and a run that starts again sees what it would have seen.
    """

    def __init__(self, rows, options, worker, workers):
        super().__init__()
        if not 0 <= worker < workers:
            raise ValueError(
                f"There is no worker {worker} of {workers}: they count from 0. Change {WORKER}."
            )
        if options.batch % workers:
            raise ValueError(
                f"A batch of {options.batch} rows does not divide over {workers} workers. Change "
                f"--batch to {options.batch + -options.batch % workers}, or the number of workers."
            )
        self.rows, self.batch = rows, options.batch
        self.worker, self.num_workers = worker, workers  # `workers` is Keras': threads that load
        self.in_all = len(rows["token_ids"])
        if options.batch > self.in_all:
            raise ValueError(
                f"A batch of {options.batch} rows is more than the {self.in_all} rows of the text. "
                "Change --batch, or --length for more rows."
            )
        self.steps = min(options.steps, self.in_all // options.batch)
        self.start_epoch(0)

    def start_epoch(self, epoch):
        self.epoch = epoch
        self.order = np.random.default_rng(epoch).permutation(self.in_all)

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        batch = self.order[step * self.batch : (step + 1) * self.batch]
        mine = batch[self.worker :: self.num_workers]
        inputs = {name: rows[mine, :-1] for name, rows in self.rows.items()}
        return inputs, self.rows["token_ids"][mine, 1:]


def check(shard, rule):
    """Stop a worker before it meets the others where its data do not fit the rule.

    `fit` would find the same, and name it, when the others already wait for this worker.
    """
    inputs, _ = shard[0]
    if missing := sorted({"token_ids", *rule.inputs} - inputs.keys()):
        raise ValueError(
            f"The data of worker {shard.worker} lack {missing}, which the model reads. "
            f"Received: {sorted(inputs)}. Return an array for each from `Shard.__getitem__`."
        )
    expected = (shard.batch // shard.num_workers, *np.shape(inputs["token_ids"])[1:])
    if odd := {name: x.shape for name, x in inputs.items() if x.shape != expected}:
        raise ValueError(
            f"Worker {shard.worker} needs inputs of shape {expected}, one id for each token. "
            f"Received: {odd}. Change what `Shard.__getitem__` returns for them."
        )


def check_devices(batch, devices):
    """Known once the workers have met: a host may have several devices."""
    if batch % devices:
        raise ValueError(
            f"A batch of {batch} rows does not divide over the {devices} devices of all workers. "
            f"Change --batch to {batch + -batch % devices}."
        )


# --- The model ------------------------------------------------------------------------------------


def make_rule(full_stop):
    own_sentence, own_paragraph = hm.SameSentence(full_stop), hm.SameSegment("paragraph_ids")
    return hm.Window(after=0) & hm.PerHead({0: own_sentence}, default=own_paragraph)


def build_model(rule, blocks):
    keras.utils.set_random_seed(0)  # each worker starts with the same weights
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "paragraph_ids")
    }
    x = layers.Embedding(VOCABULARY_SIZE, 32)(inputs["token_ids"])
    for _ in range(blocks):
        attention = hm.PerHeadMaskedMultiHeadAttention(num_heads=4, key_dim=8, mask_spec=rule)
        x = layers.Add()([x, attention(layers.LayerNormalization()(x), mask_inputs=inputs)])
        hidden = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(32)(hidden)])
    model = keras.Model(inputs, layers.Dense(VOCABULARY_SIZE)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-6), loss)
    return model


# --- What a worker does ---------------------------------------------------------------------------


class Epochs(keras.callbacks.Callback):
    """Each epoch has its order; with `--die`, the last worker does not end the second."""

    def __init__(self, shard, options):
        super().__init__()
        self.shard, self.options = shard, options

    def on_epoch_begin(self, epoch, logs=None):
        self.shard.start_epoch(epoch)

    def on_train_batch_end(self, batch, logs=None):
        last = self.shard.worker == self.shard.num_workers - 1
        if self.options.die and last and self.shard.epoch == 1 and batch == len(self.shard) // 2:
            os.kill(os.getpid(), signal.SIGKILL)


def on_jax():
    return keras.backend.backend() == "jax"


def checkpoint(options):
    """On JAX Orbax's folder, which the workers write together; on TensorFlow a file of worker 0."""
    return options.out.absolute() / ("checkpoints" if on_jax() else "checkpoint.weights.h5")


def callbacks_of(shard, options):
    """What notes where a run stands, and what writes a checkpoint after each epoch."""
    own = [Epochs(shard, options)]
    if on_jax():
        # Not in the background: a kill would leave the epoch before.
        own.append(keras.callbacks.OrbaxCheckpoint(checkpoint(options), save_on_background=False))
    elif shard.worker == 0:
        own.append(WeightsFile(checkpoint(options)))
    return own


class WeightsFile(keras.callbacks.Callback):
    """For TensorFlow: Orbax's callback takes no variable of a strategy. A kill leaves it whole."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_epoch_end(self, epoch, logs=None):
        new = self.file.with_name("new.weights.h5")
        self.model.save_weights(new)  # and the optimizer's variables, its count of steps among them
        new.replace(self.file)


def resume(model, shard, options):
    """Go on from the checkpoint, if there is one; the number of the epoch that comes next."""
    model.optimizer.build(model.trainable_variables)
    file = checkpoint(options)
    if file.is_file() or any(file.glob("*/commit_success.txt")):
        model.load_weights(file)  # the newest in a folder; with the optimizer's variables
    steps = int(model.optimizer.iterations.numpy())
    epochs, more = divmod(steps, len(shard))
    if more:
        raise ValueError(
            f"The checkpoint was written after {steps} steps, which are no "
            f"whole epochs of {len(shard)}. Train with the --batch and --steps that it was made "
            f"with, or remove {file}."
        )
    return epochs


def save(model, options, worker):
    """The model, by worker 0. All write: on JAX, Keras 3.15 waits for all where it saves."""
    file = options.out / ("model.keras" if worker == 0 else f"worker_{worker}.keras")
    model.save(file)
    if worker:
        file.unlink()


def train(options, worker=0, workers=1):
    """Train as one of `workers`, from the last checkpoint if there is one."""
    rows, full_stop = read_rows(options.length)
    rule = make_rule(full_stop)
    shard = Shard(rows, options, worker, workers)
    check(shard, rule)
    if workers > 1 and keras.backend.backend() == "tensorflow":
        return train_by_loop(rule, shard, options)
    if workers > 1:
        keras.distribution.initialize()  # reads the three variables
        check_devices(options.batch, len(keras.distribution.list_devices()))
        data_parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(data_parallel)
    return train_by_fit(rule, shard, options)


def train_by_fit(rule, shard, options):
    model = build_model(rule, options.blocks)
    model.fit(
        shard,
        initial_epoch=resume(model, shard, options),
        epochs=options.epochs,
        shuffle=False,  # `Shard` does, the same on each worker
        callbacks=callbacks_of(shard, options),
        verbose=2 if shard.worker == 0 else 0,
    )
    return model


def train_by_loop(rule, shard, options):
    """What `fit` does, for TensorFlow: Keras 3.15's own fails on several workers."""
    import tensorflow as tf

    task = {"type": "worker", "index": shard.worker}
    cluster = {"worker": os.environ[ADDRESSES].split(",")}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model(rule, options.blocks)
        first = resume(model, shard, options)

    def step_of_replica(inputs, targets):
        """Keras' losses divide by the number of workers here; its optimizers add up gradients."""
        with tf.GradientTape() as tape:
            loss = model.loss(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return loss

    @tf.function
    def step(inputs, targets):
        losses = strategy.run(step_of_replica, args=(inputs, targets))
        return strategy.reduce("SUM", losses, axis=None)

    epochs = keras.callbacks.CallbackList(callbacks_of(shard, options), model=model)
    for epoch in range(first, options.epochs):
        epochs.on_epoch_begin(epoch)
        losses = []
        for number in range(len(shard)):
            losses.append(float(step(*shard[number])))
            epochs.on_train_batch_end(number)
        epochs.on_epoch_end(epoch)
        if shard.worker == 0:
            print(f"Epoch {epoch + 1}/{options.epochs} - loss: {np.mean(losses):.4f}", flush=True)
    return model


# --- Workers on this machine ----------------------------------------------------------------------


def free_addresses(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


def run_workers(arguments, workers):
    """Start `workers` processes; what each ended with. If one fails, the others are stopped.

    They would wait for it, up to minutes, and cannot go on without it.
    """
    shared = os.environ | {ADDRESSES: free_addresses(workers), WORKERS: str(workers)}
    command = [sys.executable, sys.argv[0], *arguments]
    processes = [
        subprocess.Popen(command, env=shared | {WORKER: str(number)}) for number in range(workers)
    ]
    try:
        while None in (ended := [process.poll() for process in processes]) and not any(ended):
            time.sleep(0.1)
        return ended
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failure(ended):
    number = next(n for n, code in enumerate(ended) if code)
    return f"Worker {number} ended with {ended[number]}; the others were stopped."


def compare(options, arguments):
    """Train on workers and then in this process; print how far the weights are apart."""
    alone = argparse.Namespace(**vars(options) | {"out": options.out / "one_process"})
    alone.out.mkdir(exist_ok=True)
    for each in (options, alone):
        shutil.rmtree(each.out / "checkpoints", ignore_errors=True)  # an earlier run's
        (each.out / "checkpoint.weights.h5").unlink(missing_ok=True)
    if options.kill:
        print(failure(run_workers([*arguments, "--die"], options.workers)))
        print("Starting all again.", flush=True)
    if any(ended := run_workers(arguments, options.workers)):
        raise SystemExit(f"{failure(ended)} See its error above.")
    print("Training in one process.", flush=True)
    expected = train(alone).get_weights()
    weights = keras.saving.load_model(options.out / "model.keras").get_weights()
    start = build_model(make_rule(0), options.blocks).get_weights()
    print(f"Training moved a weight by up to {largest_difference(expected, start):.1e}.")
    apart = largest_difference(weights, expected)
    print(f"{options.workers} workers and one process differ by up to {apart:.1e}.")


def largest_difference(some, others):
    return max(abs(a - b).max() for a, b in zip(some, others, strict=True))


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if (backend := keras.backend.backend()) not in ("jax", "tensorflow"):
        raise SystemExit(f"Keras 3.15 has no workers on {backend}. Set KERAS_BACKEND=jax.")
    options.out.mkdir(parents=True, exist_ok=True)
    if WORKER not in os.environ:
        return compare(options, arguments)
    worker = int(os.environ[WORKER])
    try:
        model = train(options, worker, int(os.environ[WORKERS]))
        save(model, options, worker)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: JAX's orderly exit would wait minutes for the other workers


if __name__ == "__main__":
    main()
