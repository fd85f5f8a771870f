"""What docs/architecture.md and CONTRIBUTING.md say of the code is true of the code."""

import re

import pytest
from test_layout import ARROWS, PACKAGE

from keras_headmask.attention.kernels import FILES
from keras_headmask.attention.tuning import Tuning

ROOT = PACKAGE.parent
PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
PAGE = (ROOT / PAGES[0]).read_text(encoding="utf-8")
TREE = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"[\w./]*\w(?:\.py|\.json|\.md|/)(?![\w/.])", text)) - {"site/"}
    assert len(named) >= 10
    assert [path for path in sorted(named) if not is_there(path)] == []


def is_there(path):
    """As seen from the root, from the package or from `docs/`; a name alone: anywhere in it."""
    if any((home / path).exists() for home in (ROOT, PACKAGE, ROOT / "docs")):
        return True
    return "/" not in path and any(PACKAGE.rglob(path))


@pytest.mark.parametrize("page", PAGES)
def test_every_function_that_is_named_exists(page):
    code = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    named = re.findall(r"`(\w+)\(\)`", (ROOT / page).read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not re.search(rf"\bdef {name}\(", code)] == []


def test_a_function_is_in_the_file_that_is_named_with_it():
    named = re.findall(r"`(\w+)\(\)`\s+in\s+`([\w/]+\.py)`", PAGE)
    assert len(named) >= 8
    assert [
        (name, file)
        for name, file in named
        if f"def {name}(" not in (PACKAGE / file).read_text(encoding="utf-8")
    ] == []


def test_the_tree_names_all_of_the_package():
    _, _, inner = TREE.partition("keras_headmask/\n")
    names = re.findall(r"^  (\w+)(?:/|\.py) ", inner, re.MULTILINE)
    assert sorted(names) == sorted(ARROWS)


def test_the_arrows_are_those_that_are_checked():
    above, _, _ = PAGE.partition("<!-- kernels:start -->")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", above, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows} == ARROWS


def test_the_table_of_kernels_is_that_of_the_code():
    """What each takes is written by hand, and tried in `attention/test_choose.py`."""
    _, _, rest = PAGE.partition("<!-- kernels:start -->\n")
    _, _, *rows = rest.partition("\n<!-- kernels:end -->")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows]
    of_code = [(f"`{kernel.__name__}`", f"`{file}`") for kernel, file in FILES.items()]
    assert [(x[0], x[4]) for x in cells[1:]] == of_code


def test_numbers_that_choose_a_kernel_are_those_of_the_code():
    named = re.findall(r"`(\w+)`\s+=\s+([\d,.]*\d)", PAGE)
    assert len(named) >= 3
    given = {name: float(number.replace(",", "")) for name, number in named}
    assert given == {name: getattr(Tuning(), name) for name in given}
