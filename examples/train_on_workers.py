"""Train a masked model on several workers.

A small language model learns Python's own help texts. Head 0 sees its own sentence, the others see
their own paragraph, none looks ahead. This script trains it on two workers (processes on this
machine), each with its half of every batch, then in one process, and prints how far the weights are
apart. With `--kill` a worker is killed in mid-epoch, and both go on from the last checkpoint.

    pip install -e ".[beyond]"   # Orbax, which writes the checkpoints, is in it
    python examples/train_on_workers.py                  # 1 to 3 CPU minutes, on JAX
    python examples/train_on_workers.py --kill           # 2 to 4 CPU minutes
    python examples/train_on_workers.py --quick          # 20 steps; a cluster: docs/beyond.md
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

from pydoc_data.topics import topics

import keras
import numpy as np

import keras_headmask as hm

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
WORKERS, WORKER = "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"
NAMES, VOCABULARY, EPOCHS = ("token_ids", "paragraph_ids"), 1000, 4


def read_rows(length):
    """The two inputs, each `(rows, length + 1)`, and the id of the full stop."""
    found = dict.fromkeys(" ".join(x.split()) for t in topics.values() for x in t.split("\n\n"))
    prose = [text for text in found if re.fullmatch(r"[A-Z].*\.", text) and "::=" not in text]
    paragraphs = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in prose]
    counted = collections.Counter(word for words in paragraphs for word in words)
    frequent = enumerate(counted.most_common(VOCABULARY - 1), 1)
    ids = {word: number for number, (word, _) in frequent}  # 0: every other word
    tokens = np.array([ids.get(word, 0) for words in paragraphs for word in words], "int32")
    numbers = np.repeat(np.arange(len(paragraphs), dtype="int32"), [len(x) for x in paragraphs])
    whole = len(tokens) // (length + 1) * (length + 1)  # the last words fill no row
    tokens, numbers = (x[:whole].reshape(-1, length + 1) for x in (tokens, numbers))
    return dict(zip(NAMES, (tokens, numbers), strict=True)), ids["."]


class Shard(keras.utils.PyDataset):
    """A worker's rows of each batch; the epoch alone decides the order, so all workers agree."""

    def __init__(self, rows, batch, steps, worker, number):
        super().__init__()
        if batch % number:
            raise ValueError(f"A batch of {batch} rows does not divide over {number} workers.")
        self.rows, self.batch = rows, batch
        self.steps = min(steps, len(rows["token_ids"]) // batch)
        self.worker, self.number, self.epoch = worker, number, 0

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        order = np.random.default_rng(self.epoch).permutation(len(self.rows["token_ids"]))
        mine = order[step * self.batch : (step + 1) * self.batch][self.worker :: self.number]
        inputs = {name: rows[mine, :-1] for name, rows in self.rows.items()}
        return inputs, self.rows["token_ids"][mine, 1:]


def build_model(full_stop):
    keras.utils.set_random_seed(0)  # each worker starts with the same weights
    own = hm.PerHead({0: hm.SameSentence(full_stop)}, default=hm.SameSegment("paragraph_ids"))
    rule = own & hm.Window(after=0)
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in NAMES}
    x = keras.layers.Embedding(VOCABULARY, 32)(inputs["token_ids"])
    for _ in range(2):
        attention = hm.PerHeadMaskedMultiHeadAttention(num_heads=4, key_dim=8, mask_spec=rule)
        x = keras.layers.LayerNormalization()(x + attention(x, mask_inputs=inputs))
    model = keras.Model(inputs, keras.layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-6), loss)
    return model


def train(options, out, worker=0, number=1):
    """Train as one of `number` workers, from the last checkpoint if there is one."""
    out.mkdir(parents=True, exist_ok=True)
    rows, full_stop = read_rows(length=16 if options.quick else 64)
    shard = Shard(rows, 8 if options.quick else 32, 5 if options.quick else 20, worker, number)
    if number > 1:
        keras.distribution.initialize()  # reads the three variables
        split = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(split)

    def die(step, logs):
        if options.die and worker == 1 and shard.epoch == 1 and step == len(shard) // 2:
            os.kill(os.getpid(), 9)  # by no handler

    model, folder = build_model(full_stop), out.absolute() / "checkpoints"
    model.optimizer.build(model.trainable_variables)
    if any(folder.glob("*/commit_success.txt")):
        model.load_weights(folder)  # the newest; with the optimizer's variables
    first, more = divmod(int(model.optimizer.iterations.numpy()), len(shard))
    if more:
        raise ValueError(f"{folder} holds no whole epochs of {len(shard)} steps. Remove it.")
    checkpoint = keras.callbacks.OrbaxCheckpoint(folder, save_on_background=False)
    starts = {"on_epoch_begin": lambda epoch, _: setattr(shard, "epoch", epoch)}
    epochs = keras.callbacks.LambdaCallback(**starts, on_train_batch_end=die)
    told = {"callbacks": [epochs, checkpoint], "verbose": 2 * (worker == 0)}
    model.fit(shard, initial_epoch=first, epochs=EPOCHS, shuffle=False, **told)
    model.save(out / f"worker_{worker}.keras")  # all write: Keras waits for all where it saves
    return model


def run_workers(arguments):
    """Start two processes; what each ended with. If one fails, the other is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = os.environ | {ADDRESSES: f"127.0.0.1:{free.getsockname()[1]}", WORKERS: "2"}
    command = [sys.executable, __file__, *arguments]
    workers = [subprocess.Popen(command, env=shared | {WORKER: str(n)}) for n in range(2)]
    while None in (ended := [worker.poll() for worker in workers]) and not any(ended):
        time.sleep(0.1)
    for worker in workers:
        worker.kill()
        worker.wait()
    return ended


def main(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="20 steps, learns next to nothing")
    parser.add_argument("--kill", action="store_true", help="kill a worker in mid-epoch")
    parser.add_argument("--die", action="store_true", help="what `--kill` adds for the workers")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/workers"))
    options = parser.parse_args(arguments)
    if WORKER in os.environ:
        try:
            return train(options, options.out, int(os.environ[WORKER]), int(os.environ[WORKERS]))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)  # at once: JAX's orderly exit would wait minutes for the other worker
    alone = options.out / "one_process"
    for folder in (options.out, alone):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # an earlier run's
    if options.kill:
        ended = run_workers([*arguments, "--die"])
        print(f"Workers ended with {ended}. Starting all again.", flush=True)
    if any(ended := run_workers(arguments)):
        raise SystemExit(f"Workers ended with {ended}. See the error above.")
    print("Training in one process.", flush=True)
    expected = train(options, alone).get_weights()
    weights = keras.saving.load_model(options.out / "worker_0.keras").get_weights()
    apart = max(abs(a - b).max() for a, b in zip(weights, expected, strict=True))
    print(f"2 workers and one process differ by up to {apart:.1e}.")


if __name__ == "__main__":
    main(sys.argv[1:])
