"""Versions of a model, `<base>/<integer>/`: read, and each published whole or not at all.

Names are read as TensorFlow Serving reads them, by number: the folder "0003" is version 3.

A version is written in a hidden sibling and appears by one rename. The writer holds a lock on that
sibling, which the system drops when the process dies: so the next writer knows what was left
behind and what is still being written. It removes only what a writer marked and made.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: what killed writers leave behind stays
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".keras_headmask-export-"
_MARK = "being-written-by-keras_headmask"  # a file beside the version, which never goes with it
_WRITTEN = "version"
_PAST = 2**63  # versions are int64
_NOBODYS = {"lost+found"}  # at the top of a volume, by the file system


def checked_base(base_path: str | os.PathLike) -> pathlib.Path:
    """`base_path` as a folder of versions, there already or not."""
    text = os.fspath(base_path)
    if not isinstance(text, str) or not text:
        raise TypeError(f"`base_path` must be a path as text. Received: {base_path!r}.")
    if "://" in text:
        raise ValueError(
            f"`base_path` must be a local folder, where a version appears by one rename. Received: "
            f"{text!r}. Export to a local folder and copy the finished version, its "
            "saved_model.pb last."
        )
    base = pathlib.Path(text).expanduser()
    folders = {p.name for p in base.iterdir() if p.is_dir()} if base.is_dir() else set()
    strange = [x for x in folders - _NOBODYS if x[0] != "." and _number(x) is None]
    if base.is_symlink() and not base.exists():
        wrong = f"a link to {os.readlink(base)!r}, which is not there."
    elif base.exists() and not base.is_dir():
        wrong = "which is a file."
    elif (base / "saved_model.pb").exists():
        wrong = "which is a SavedModel itself. Pass the folder above it, or a new one."
    elif strange:
        some = sorted(strange)[:3]
        wrong = f"which holds {some}. Pass a folder that is new, empty or holds versions."
    else:
        return base
    raise ValueError(
        "`base_path` must be a folder of versions, <base>/1, <base>/2, ... "
        f"Received: {text!r}, {wrong}"
    )


def checked_version(version: int | None, base: pathlib.Path) -> int:
    """`version`, or the next free one."""
    taken = versions(base)
    number = max(taken, default=0) + 1 if version is None else version
    if version is None and number >= _PAST:
        raise ValueError(
            f"Version {_PAST - 1} exists in '{base}', and servers know none above it. Pass "
            "`version`, one that is free, or another base path."
        )
    if type(number) is not int or not 0 <= number < _PAST:
        raise ValueError(f"`version` must be a whole number from 0. Received: {version!r}.")
    if number in taken:
        raise FileExistsError(
            f"Version {version} exists in '{base}', and servers treat a version as final. Pass "
            "another number, or version=None for the next free one."
        )
    return number


def versions(base: pathlib.Path) -> list[int]:
    """The numbers that are taken, by a folder or by a file."""
    numbers = {_number(path.name) for path in base.iterdir()} if base.is_dir() else set()
    return sorted(number for number in numbers if number is not None)


def _number(name: str) -> int | None:
    """The version that a name means, if any."""
    is_number = name.isascii() and name.isdigit() and int(name) < _PAST
    return int(name) if is_number else None


# --- Reading --------------------------------------------------------------------------------------


def version_folders(base_path: str | os.PathLike) -> dict[int, pathlib.Path]:
    """`{version: folder}` for `<base_path>/<integer>/`, the newest first.

    Other names are skipped, as by TensorFlow Serving: configurations, folders half-written. Of "3"
    and "0003" it takes either, with a warning in its log; here it is "3".

    Raises:
        FileNotFoundError: if `base_path` is not a folder.
    """
    base = pathlib.Path(base_path)
    if not base.is_dir():
        raise FileNotFoundError(
            "`base_path` must be a folder that holds versions, <base_path>/1/ and so on. There is "
            f"no folder {str(base_path)!r}."
        )
    folders = sorted((p for p in base.iterdir() if p.is_dir()), key=lambda p: -len(p.name))
    numbered = {n: folder for folder in folders if (n := _number(folder.name)) is not None}
    return dict(sorted(numbered.items(), reverse=True))


def read_signatures(folder: str | os.PathLike) -> dict[str, Any]:
    """`{name: SignatureDef}` of the SavedModel in `folder`, without what its initializer adds.

    Raises:
        ValueError: if the file is missing, is not a SavedModel, or has nothing to serve.
    """
    from tensorflow.core.protobuf import saved_model_pb2

    path = pathlib.Path(folder) / "saved_model.pb"
    try:
        meta_graphs = saved_model_pb2.SavedModel.FromString(path.read_bytes()).meta_graphs
    except Exception as error:  # of protobuf's own class, which differs between its versions
        raise ValueError(f"{str(path)!r} is not a readable SavedModel: {error}") from error
    signatures = {
        name: signature
        for graph in meta_graphs
        if "serve" in graph.meta_info_def.tags
        for name, signature in graph.signature_def.items()
        if not name.startswith("__saved_model")  # `__saved_model_init_op`, which serves nothing
    }
    if not signatures:
        raise ValueError(
            f"{str(path)!r} holds no signature under the tag 'serve'. Write it with "
            f"`model.export(...)` or `keras.export.ExportArchive`."
        )
    return signatures


def tensors_of(infos: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int | None, ...] | None]]:
    """(dtype, shape) by name of one side of a SignatureDef; no shape where the rank is unknown."""
    import tensorflow as tf

    shapes = {name: tf.TensorShape(infos[name].tensor_shape) for name in sorted(infos)}
    return {
        name: (tf.as_dtype(infos[name].dtype).name, tuple(x) if x.rank is not None else None)
        for name, x in shapes.items()
    }


# --- Writing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def being_written(base: pathlib.Path) -> Iterator[pathlib.Path]:
    """A hidden folder beside the versions, gone at the end unless it was published."""
    new_folders = [path for path in (base, *base.parents) if not path.exists()]  # the deepest first
    try:
        with contextlib.ExitStack() as locks:
            sibling = _new_sibling(base, locks)
            try:
                (sibling / _MARK).touch()
                (sibling / _WRITTEN).mkdir()
                yield sibling / _WRITTEN
            finally:
                _remove(sibling)
                with contextlib.suppress(OSError):  # something was published there
                    for path in new_folders:
                        path.rmdir()
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(
            f"The export could not be written to '{base}', and nothing was published: {error}"
        ) from error


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A path beside `path` to write to; it replaces `path` at the end, in one step."""
    file = pathlib.Path(path).resolve()  # a link stays one
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as folder:
        written = pathlib.Path(folder) / file.name
        yield written
        os.replace(written, file)


def publish(folder: pathlib.Path, base: pathlib.Path, version: int | None) -> int:
    """Give `folder` its number by one rename, and return the number.

    A rename onto a folder that holds something fails, so two writers never share a version.
    """
    for path in (*folder.rglob("*"), folder):
        _to_disk(path)
    while True:
        number = checked_version(version, base)
        try:
            os.rename(folder, base / str(number))
        except OSError:
            if not (base / str(number)).exists():
                raise
            continue  # another writer was faster
        _to_disk(base)
        return number


def _new_sibling(base: pathlib.Path, locks: contextlib.ExitStack) -> pathlib.Path:
    """A folder that only this writer has locked; what killed writers left is removed first."""
    for left in base.glob(f"{_PREFIX}*/") if fcntl is not None else ():
        with contextlib.suppress(OSError), _opened(left) as lock:  # a link, or held by its writer
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
    while True:
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another writer removed it, not locked yet
            sibling = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            if fcntl is None:
                return sibling
            lock = locks.enter_context(_opened(sibling))
            with contextlib.suppress(OSError):  # a file system without locks: nobody cleans there
                fcntl.flock(lock, fcntl.LOCK_EX)
            if sibling.exists():
                return sibling


def _remove(sibling: pathlib.Path) -> None:
    """A marked folder, or an empty one, whose writer was killed before it could mark it.

    The mark goes last: if this process is killed, too, the next writer still knows the folder.
    """
    if (sibling / _MARK).is_file():
        shutil.rmtree(sibling / _WRITTEN, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else's file is in it
        if {p.name for p in sibling.iterdir()} == {_MARK}:
            (sibling / _MARK).unlink()
        sibling.rmdir()


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _to_disk(path: pathlib.Path) -> None:
    """So that a version is whole after a power cut, too."""
    if os.name != "nt":
        with _opened(path) as file, contextlib.suppress(OSError):  # not on every file system
            os.fsync(file)
