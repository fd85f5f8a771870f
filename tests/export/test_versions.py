"""Versions appear whole or not at all, whichever process dies, and no two writers share one."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from keras_headmask.export import versions

pytestmark = [
    pytest.mark.tensorflow,  # one backend is enough
    pytest.mark.skipif(versions.fcntl is None, reason="needs a system with flock"),
]

# The module imports nothing else of the package, so a writer starts at once, without any framework.
WRITER = """
import importlib.util, os, pathlib, signal, sys
spec = importlib.util.spec_from_file_location("versions", {module!r})
versions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(versions)
base = pathlib.Path(sys.argv[1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def write(folder, text="whole"):
    (folder / "variables").mkdir()
    (folder / "variables" / "data").write_text(text)
    (folder / "saved_model.pb").write_text(text)
"""
DEATHS = {
    "before anything is written": "with versions.being_written(base) as f: die()",
    "half-way": """
        with versions.being_written(base) as f:
            (f / "saved_model.pb").write_text("half")
            die()
        """,
    "before it is published": """
        with versions.being_written(base) as f:
            write(f)
            die()
        """,
    "before the rename": """
        versions.os.rename = lambda *_: die()
        with versions.being_written(base) as f:
            write(f)
            versions.publish(f, base, None)
        """,
    "between making the folder and locking it": """
        versions.fcntl.flock = lambda *_: die()
        with versions.being_written(base) as f: pass
        """,
}


def start(program, *arguments):
    code = WRITER.format(module=versions.__file__) + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)])


def write(folder, text="whole"):
    (folder / "variables").mkdir()
    (folder / "variables" / "data").write_text(text)
    (folder / "saved_model.pb").write_text(text)


def is_whole(version):
    return {p.name for p in version.iterdir()} == {"saved_model.pb", "variables"} and (
        (version / "saved_model.pb").read_text() == (version / "variables" / "data").read_text()
    )


@pytest.mark.parametrize("death", DEATHS)
def test_a_writer_killed_leaves_nothing_that_a_server_sees_and_the_next_cleans_up(death, tmp_path):
    assert start(DEATHS[death], tmp_path).wait() == -signal.SIGKILL
    assert versions.versions(tmp_path) == []
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".")
    with versions.being_written(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder.parent]
        write(folder)
        assert versions.publish(folder, tmp_path, None) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert is_whole(tmp_path / "1")


@pytest.mark.parametrize("name", [".export-v2", f"{versions._PREFIX}v2"])
def test_a_folder_that_no_writer_marked_stays_with_all_its_files(name, tmp_path):
    theirs = tmp_path / name
    (theirs / versions._WRITTEN).mkdir(parents=True)
    (theirs / versions._WRITTEN / "notes.txt").write_text("a year of work")
    (tmp_path / f"{versions._PREFIX}link").symlink_to(theirs)
    with versions.being_written(tmp_path) as folder:
        write(folder)
        versions.publish(folder, tmp_path, None)
    assert (theirs / versions._WRITTEN / "notes.txt").read_text() == "a year of work"
    assert is_whole(tmp_path / "1")  # without the mark


def test_in_a_marked_folder_only_what_a_writer_makes_is_removed(tmp_path):
    start(DEATHS["half-way"], tmp_path).wait()
    (left,) = tmp_path.iterdir()
    (left / "theirs.txt").write_text("kept")
    with versions.being_written(tmp_path):
        pass
    assert {p.name for p in left.iterdir()} == {"theirs.txt", versions._MARK}
    (left / "theirs.txt").unlink()
    with versions.being_written(tmp_path):
        pass
    assert not left.exists()


def test_killed_after_the_rename_the_version_is_there_and_whole(tmp_path):
    program = """
        rename = os.rename
        def rename_and_die(*pair):
            rename(*pair)
            die()
        versions.os.rename = rename_and_die
        with versions.being_written(base) as f:
            write(f)
            versions.publish(f, base, None)
        """
    assert start(program, tmp_path).wait() == -signal.SIGKILL
    assert is_whole(tmp_path / "1")
    with versions.being_written(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_what_a_living_writer_has_not_published_yet_stays(tmp_path):
    program = """
        with versions.being_written(base) as f:
            write(f)
            print(flush=True)
            sys.stdin.read()
            versions.publish(f, base, None)
        """
    code = WRITER.format(module=versions.__file__) + textwrap.dedent(program)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        with versions.being_written(tmp_path) as folder:
            assert len(list(tmp_path.iterdir())) == 2
            write(folder)
            assert versions.publish(folder, tmp_path, None) == 1
        other.stdin.close()
        assert other.wait() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_writers_at_once_never_share_a_version(tmp_path):
    program = """
        for i in range(20):
            with versions.being_written(base) as f:
                write(f, f"{sys.argv[2]} {i}")
                versions.publish(f, base, None)
        """
    writers = [start(program, tmp_path, n) for n in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert versions.versions(tmp_path) == list(range(1, 81))
    assert all(is_whole(version) for version in tmp_path.iterdir())
    texts = {(version / "saved_model.pb").read_text() for version in tmp_path.iterdir()}
    assert len(texts) == 80


def test_one_of_two_writers_of_the_same_number_gets_an_error(tmp_path):
    with versions.being_written(tmp_path) as one, versions.being_written(tmp_path) as other:
        write(one)
        write(other, "other")
        assert versions.publish(one, tmp_path, 7) == 7
        with pytest.raises(FileExistsError, match="Version 7 exists"):
            versions.publish(other, tmp_path, 7)
    assert [p.name for p in tmp_path.iterdir()] == ["7"]
    assert (tmp_path / "7" / "saved_model.pb").read_text() == "whole"


def test_reader_and_writer_read_numbers_as_a_server_does(tmp_path):
    for name in (
        "0003",
        "2",
        "x1",
        ".hidden",
        "-1",
        "1.5",
        "\N{ARABIC-INDIC DIGIT THREE}",
        str(2**63),
    ):
        (tmp_path / name).mkdir()
    assert versions.versions(tmp_path) == [2, 3]
    assert versions.version_folders(tmp_path) == {3: tmp_path / "0003", 2: tmp_path / "2"}
    with pytest.raises(FileExistsError, match="Version 3 exists"):
        versions.checked_version(3, tmp_path)
    with versions.being_written(tmp_path) as folder:
        write(folder)
        assert versions.publish(folder, tmp_path, None) == 4


def test_of_two_folders_of_one_number_the_plain_one_is_read(tmp_path):
    for name in ("007", "7", "0007"):
        (tmp_path / name).mkdir()
    assert versions.version_folders(tmp_path) == {7: tmp_path / "7"}


def test_a_new_base_is_gone_again_if_nothing_was_published(tmp_path):
    with pytest.raises(KeyError), versions.being_written(tmp_path / "a" / "b"):
        raise KeyError
    assert not (tmp_path / "a").exists()


def test_a_version_is_as_readable_as_other_new_folders(tmp_path):
    with versions.being_written(tmp_path) as folder:
        write(folder)
        versions.publish(folder, tmp_path, None)
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "1").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("bad", [True, -1, 2**63, "1", 1.0])
def test_a_version_is_a_whole_number(bad, tmp_path):
    with pytest.raises(ValueError, match="`version` must be a whole number"):
        versions.checked_version(bad, tmp_path)


def test_a_base_path_is_a_folder_of_versions(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "saved_model.pb").write_text("")
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "good" / "1").mkdir(parents=True)
    (tmp_path / "good" / "lost+found").mkdir()  # as at the top of a volume
    (tmp_path / "good" / "models.config").write_text("")
    for name, message in {
        "file": "which is a file",
        "model": "a SavedModel itself",
        "project": r"which holds \['src'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            versions.checked_base(tmp_path / name)
    with pytest.raises(ValueError, match="must be a local folder"):
        versions.checked_base("gs://bucket/model")
    assert versions.checked_base(str(tmp_path / "good")) == pathlib.Path(tmp_path / "good")
    assert versions.checked_base(os.path.join(tmp_path, "new")) == tmp_path / "new"


def test_the_last_number_has_no_next(tmp_path):
    (tmp_path / str(2**63 - 1)).mkdir()
    with pytest.raises(ValueError, match=r"Version 9223372036854775807 exists .* none above it"):
        versions.checked_version(None, tmp_path)
    versions.checked_version(4, tmp_path)


def test_a_base_path_of_home_of_a_link_and_of_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert versions.checked_base("~/models") == tmp_path / "models"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"a link to '.*nowhere', which is not there"):
        versions.checked_base(tmp_path / "link")
    for bad in (b"models", ""):
        with pytest.raises(TypeError, match="must be a path as text"):
            versions.checked_base(bad)


def test_publishing_leaves_the_umask_of_the_process_alone(tmp_path, monkeypatch):
    """Between its two changes, another thread would read the wrong one and put it back."""
    (tmp_path / "usual").mkdir()
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    with versions.being_written(tmp_path / "base") as folder:
        (folder / "saved_model.pb").write_text("whole")
        number = versions.publish(folder, tmp_path / "base", None)
    mode = (tmp_path / "base" / str(number)).stat().st_mode
    assert mode == (tmp_path / "usual").stat().st_mode
