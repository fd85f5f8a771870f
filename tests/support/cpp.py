"""The C++ loader: built against the TensorFlow wheel, and run on requests."""

import fcntl
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

_SOURCE = pathlib.Path(__file__).with_name("loader.cc")


def why_not():
    """Why the loader cannot be built here, or `None`."""
    import tensorflow as tf

    if shutil.which("g++") is None:
        return "needs g++"
    libraries = pathlib.Path(tf.sysconfig.get_lib())
    if not (libraries / "libtensorflow_cc.so.2").exists():
        return "needs libtensorflow_cc.so.2, which this TensorFlow has not"
    return None


def build(folder):
    """The program, built in `folder` by whoever comes first, for all processes of a test run."""
    with open(pathlib.Path(folder, "loader.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = pathlib.Path(folder, "loader")
        if not program.exists():
            _compile(program)
    return program


def _compile(program):
    import tensorflow as tf

    libraries = tf.sysconfig.get_lib()
    flags = [*tf.sysconfig.get_compile_flags(), "-O1", "-std=c++17", "-DNDEBUG", "-w"]
    # (Sessions are registered by a library of which nothing is called by name.)
    linked = ["-Wl,--no-as-needed", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"]
    where = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command = ["g++", *flags, str(_SOURCE), "-o", str(program), *where, *linked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])


def run(program, saved_model, requests, calls=0, environment=None):
    """Answers to `(signature, inputs)` pairs: a dict of arrays, or the text of the error.

    With `calls`, pairs of an answer and the microseconds of so many calls.
    """
    import tensorflow as tf
    from tensorflow.core.framework import tensor_pb2

    with tempfile.TemporaryDirectory() as place:
        folders = [pathlib.Path(place, str(i)) for i in range(len(requests))]
        for folder, (signature, inputs) in zip(folders, requests, strict=True):
            folder.mkdir()
            (folder / "signature").write_text(signature)
            for name, value in inputs.items():
                proto = tf.make_tensor_proto(value)
                (folder / f"{name}.pb").write_bytes(proto.SerializeToString())
        command = [str(program), str(saved_model), place, str(calls)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{done.returncode}: {done.stderr[-3000:]}")
        answers = []
        for folder in folders:
            if (folder / "error").exists():
                answers.append((folder / "error").read_text())
                continue
            read = {}
            for file in folder.glob("*.out"):
                proto = tensor_pb2.TensorProto.FromString(file.read_bytes())
                read[file.stem] = tf.make_ndarray(proto)
            answers.append(read)
        if not calls:
            return answers
        times = [np.loadtxt(folder / "times", ndmin=1) for folder in folders]
        return list(zip(answers, times, strict=True))
