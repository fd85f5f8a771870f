"""Docstrings of what is public are complete: what goes in, what comes out, what is raised."""

import dis
import inspect
import re
import textwrap

import pytest

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow  # a docstring is the same on each backend

# A first line that names the result needs no "Returns:" that says it again.
NAMES_THE_RESULT = re.compile(r"(?:The|A|An|Whether)\b")


def with_members(name, value):
    """A class with its public methods and properties, but overrides that inherit a docstring."""
    yield name, value
    for member, own in vars(value).items() if isinstance(value, type) else ():
        is_code = isinstance(own, property) or inspect.isroutine(own)
        inherits = any(member in vars(base) for base in value.__mro__[1:])
        if is_code and not member.startswith("_") and (own.__doc__ or not inherits):
            yield f"{name}.{member}", own if isinstance(own, property) else getattr(value, member)


MODULES = "hugging_face", "recipes", "testing"


def public():
    values = {name: getattr(hm, name) for name in hm.__all__ if name not in MODULES}
    for name in ("mask_heads", "unmask"):
        values[f"hugging_face.{name}"] = getattr(hm.hugging_face, name)
    values["testing.assert_no_leaks"] = hm.testing.assert_no_leaks
    values["testing.assert_steps_equal"] = hm.testing.assert_steps_equal
    values["testing.check_spec"] = hm.testing.check_spec
    for name, recipe in inspect.getmembers(hm.recipes, inspect.isfunction):
        if recipe.__module__ == hm.recipes.__name__:
            values[f"recipes.{name}"] = recipe
    return dict(pair for named in values.items() for pair in with_members(*named))


def section(docstring, title):
    """The text under `title`, or "" without one."""
    found = re.search(rf"^(?:{title}):\n((?: .*\n|\n(?= ))+)", f"{docstring}\n", re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def arguments(text, parameters):
    """Each name before a colon; "a, ..., d" stands for all parameters from `a` to `d`."""
    names = []
    for entry in re.findall(r"^(\S[^:]*):", text, re.MULTILINE):
        listed = [name.strip("* ") for name in entry.split(",")]
        while "..." in listed:
            at = listed.index("...")
            start, stop = (parameters.index(listed[i]) for i in (at - 1, at + 1))
            listed[at : at + 1] = parameters[start + 1 : stop]
        names += listed
    return names


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
    named = arguments(section(docstring, "Args|Attributes"), parameters)
    if sorted(named) != sorted(parameters):
        yield f"`Args:` must name {parameters}, and names {named}"
    returns = not isinstance(value, type) and signature.return_annotation is not None
    if returns and not NAMES_THE_RESULT.match(docstring) and not section(docstring, "Returns"):
        yield "has no `Returns:`"


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_is_complete(name):
    assert list(faults(PUBLIC[name])) == []
