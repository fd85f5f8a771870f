"""Which folder may import which, read from the imports; and where private names of Keras stand.

Ruff, by its settings in pyproject.toml, keeps code of a backend out of what is imported first.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "keras_headmask"

ARROWS = {
    "_keras": set(),  # and every row may import it
    "masks": set(),
    "rules": {"masks"},
    "attention": {"masks", "rules"},
    "layers": {"masks", "rules", "attention"},
    "retrofit": {"masks", "rules", "attention", "layers"},
    "generation": {"masks", "rules", "attention", "layers", "retrofit"},
    "look": {"masks", "rules", "attention", "layers", "retrofit"},
    "linting": {"masks", "rules", "attention", "retrofit"},
    "heads": {"masks", "rules", "attention", "layers", "retrofit", "generation", "look"},
    "export": {"masks", "rules", "attention", "retrofit"},
}


def name_of(path):
    """As it is imported: `rules.words`, and `rules` for the folder itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
MODULES = sorted(set(FILES) - {""})


def imported(nodes):
    """Dotted names that import statements among `nodes` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def tree(module):
    return ast.parse(FILES[module].read_text())


def ours(names):
    """The modules of ours among dotted names."""
    inner = {name.removeprefix("keras_headmask.") for name in names}
    return {name for name in inner & set(FILES) if name}


def folder(module):
    return module.split(".")[0]


# The most lines of each folder. A number may be lowered; a commit that raises one says what could
# not be deleted instead.
MOST_LINES = {
    "attention": 2_690,
    "rules": 3_130,
    "retrofit": 3_170,
    "heads": 1_280,
    "export": 590,
    "look": 660,
    "layers": 800,
    "linting": 270,
    "_keras": 580,
    "generation": 150,
    "masks": 440,
}


@pytest.mark.parametrize("name", ARROWS)
def test_no_folder_grows(name):
    lines = {m: len(FILES[m].read_text("utf-8").splitlines()) for m in FILES if folder(m) == name}
    longest = sorted(lines, key=lines.get)[-3:]
    assert sum(lines.values()) <= MOST_LINES[name], f"delete something; the longest: {longest}"


@pytest.mark.parametrize("name", ARROWS)
def test_every_folder_says_what_it_is_for(name):
    assert ast.get_docstring(tree(name))


@pytest.mark.parametrize("module", MODULES)
def test_arrows_between_folders(module):
    to = {folder(name) for name in ours(imported(ast.walk(tree(module))))}
    assert to - {folder(module)} <= ARROWS[folder(module)] | {"_keras"}


def test_arrows_run_one_way():
    """Each folder can be put after all that it imports, and so can each file."""
    files = {name: ours(imported(ast.walk(tree(name)))) - {name} for name in MODULES}
    for arrows in (ARROWS, files):
        placed, waiting = set(), dict(arrows)
        while waiting:
            ready = {name for name, needs in waiting.items() if needs <= placed}
            assert ready, f"a circle among {sorted(waiting)}"
            placed |= ready
            waiting = {m: needs for m, needs in waiting.items() if m not in ready}


# --- Private names -------------------------------------------------------------------------------

PRIVATE = re.compile("_[A-Za-z][A-Za-z0-9_]*")  # neither `_` nor `__dunder__`
# Of tuples with names, of bytecode; of transformers' configs, which have no other.
OF_OTHERS = {"_replace", "_LOAD_FAST", "_attn_implementation"}


def private_names(module):
    """Of attributes, and in strings, as `getattr` takes them."""
    nodes = list(ast.walk(tree(module)))
    in_f_strings = {id(x) for n in nodes if isinstance(n, ast.JoinedStr) for x in n.values}
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    names |= {
        str(n.value) for n in nodes if isinstance(n, ast.Constant) and id(n) not in in_f_strings
    }
    return set(filter(PRIVATE.fullmatch, names))


def defined(module):
    """The names of functions, classes and variables, and what methods set on themselves."""
    for n in ast.walk(tree(module)):
        if isinstance(n, ast.FunctionDef | ast.ClassDef):
            yield n.name
        elif isinstance(getattr(n, "ctx", None), ast.Store):
            name, _, attribute = ast.unparse(n).rpartition(".")
            yield from [attribute] if name in ("", "self", "cls") else []


OVERRIDDEN = next(
    set(ast.literal_eval(node.value))
    for node in tree("_keras").body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OVERRIDDEN"
)
OTHERS = sorted(set(FILES) - {"_keras"})
OURS = {name for module in OTHERS for name in defined(module)} - private_names("_keras")


@pytest.mark.parametrize("module", OTHERS)
def test_private_names_of_keras_and_tensorflow_stand_in_one_file(module):
    """Any other must be one that the package defines, or a method that it overrides.

    (Ruff refuses imports of their private modules, and private attributes of what is not `self`.)
    """
    assert private_names(module) <= OURS | OF_OTHERS | OVERRIDDEN
