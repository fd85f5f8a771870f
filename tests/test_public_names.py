"""Public names arrive on first use and have whole docstrings; the import alone is small."""

import dis
import importlib
import inspect
import pathlib
import re
import textwrap

import pytest
from fresh import run_fresh

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow  # one backend is enough
ROOT = pathlib.Path(__file__).parents[1]


def test_type_checkers_see_the_lazy_names_that_python_finds():
    _, _, text = pathlib.Path(hm.__file__).read_text("utf-8").partition("\nif TYPE_CHECKING:")
    block, _, _ = text.partition("\n_HOMES")
    pairs = re.findall(r"from keras_headmask\.(\S+) import (\([^)]*\)|.*)", block)
    imported = {name: home for home, names in pairs for name in re.findall(r"\w+", names)}
    assert imported == hm._HOME_OF
    assert imported.keys() < set(hm.__all__)


def test_each_lazy_name_is_the_one_of_its_home():
    for name, module in hm._HOME_OF.items():
        home = importlib.import_module(f"keras_headmask.{module}")
        vars(hm).pop(name, None)  # as if it had not been used
        assert name in dir(hm)
        assert getattr(hm, name) is getattr(home, name)
        assert vars(hm)[name] is getattr(home, name)
    given = {}
    exec("from keras_headmask import *", given)
    assert given.keys() >= set(hm.__all__)


# In this order: what is asked last imports more.
PROGRAM = """
import sys
import keras_headmask as hm
late = ("linting", "export", "look", "retrofit.apply")
found = [name for name in late if f"keras_headmask.{name}" in sys.modules]
assert not found, found
import keras
assert hm.mask_specs(keras.saving.load_model(sys.argv[1]))
"""


def test_the_import_alone_is_small_and_lets_files_load():
    run_fresh(PROGRAM, ROOT / "saved_models" / "golden" / "format-1" / "model.keras")


# --- Docstrings -----------------------------------------------------------------------------------


# A first line that names the result needs no "Returns:" that says it again.
NAMES_THE_RESULT = re.compile(r"(?:The|A|An|Whether)\b")


def is_of(value, module):
    return getattr(value, "__module__", "") == module


INSIDE = {
    "hugging_face": ["mask_heads", "unmask"],
    "recipes": [x for x, f in vars(hm.recipes).items() if is_of(f, hm.recipes.__name__)],
    "testing": ["assert_no_leaks", "assert_steps_equal", "check_spec"],
}


def public():
    """By name: functions, classes and their public methods, but overrides without a docstring."""
    values = {name: getattr(hm, name) for name in hm.__all__ if name not in INSIDE}
    for module, names in INSIDE.items():
        values |= {f"{module}.{name}": getattr(getattr(hm, module), name) for name in names}
    for name, value in values.items():
        yield name, value
        for member, own in vars(value).items() if isinstance(value, type) else ():
            is_code = isinstance(own, property) or inspect.isroutine(own)
            inherits = any(member in vars(base) for base in value.__mro__[1:])
            if is_code and not member.startswith("_") and (own.__doc__ or not inherits):
                yield f"{name}.{member}", getattr(value, member)


def section(docstring, title):
    """The text under `title`, or "" without one."""
    found = re.search(rf"^(?:{title}):\n((?: .*\n|\n(?= ))+)", f"{docstring}\n", re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def raises(code):
    """Whether a function, or one inside it, has a `raise` of its own or calls `fields.fail`."""
    inner = [x for x in code.co_consts if inspect.iscode(x)]
    own = "fail" in code.co_names or "RAISE_VARARGS" in [x.opname for x in dis.Bytecode(code)]
    return own or any(map(raises, inner))


def faults(value):
    docstring = inspect.getdoc(value) or ""
    bodies = [value.fget] if isinstance(value, property) else [value]
    if isinstance(value, type):
        bodies = [value.__init__, getattr(value, "__post_init__", None)]
    if not docstring:
        yield "has no docstring"
    must_say = any(raises(x.__code__) for x in bodies if inspect.isfunction(x))
    if must_say and not section(docstring, "Raises"):
        yield "has no `Raises:`"
    if isinstance(value, property):
        return
    signature = inspect.signature(value)
    parameters = [name for name in signature.parameters if name != "self"]
    heads = re.findall(r"^(\S[^:]*):", section(docstring, "Args|Attributes"), re.MULTILINE)
    named = re.findall(r"\w+|\.{3}", " ".join(heads))  # "a, ..., d": what is between them, too
    missing = [] if "..." in named else set(parameters) - set(named)
    if missing or set(named) - {*parameters, "..."}:
        yield f"`Args:` must name {parameters}, and names {named}"
    returns = not isinstance(value, type) and signature.return_annotation is not None
    if returns and not NAMES_THE_RESULT.match(docstring) and not section(docstring, "Returns"):
        yield "has no `Returns:`"


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_is_complete(name):
    assert list(faults(PUBLIC[name])) == []
