"""What pages say of the code is true of it, their links lead somewhere, and their words are plain.

Nothing of the package is imported: `make lint` runs this in seconds.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from test_layout import ARROWS, PACKAGE

ROOT = PACKAGE.parent
README = ROOT / "README.md"
PAGES = {page.stem: page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
PROSE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted(PACKAGE.rglob("*.py"))
CODE = "".join(file.read_text("utf-8") for file in SOURCES)

# --- Words ----------------------------------------------------------------------------------------

# Say "reports", "implementation", "stock Keras", "not possible", "logits" or "probabilities", and
# "wrapper". Only "Cannot tell" is plain.
VAGUE = re.compile(
    r"\b(?:told|tells|(?<!Cannot )tell|ways?|face|room|doors?|stock's"
    r"|(?:is|are)\snone|cannot\sbe|(?<!--)scores?|whoever|comes?\sof|what\sis\sasked)\b"
)
# What is code in a page, and in a docstring or a message: examples, the name of an argument.
IN_PAGES = re.compile(r"^```.*?^```$|`[^`]+`", re.MULTILINE | re.DOTALL)
IN_STRINGS = re.compile(r"^ *(?:>>>|\.\.\.) .*|^ *\w+(?:, \w+)*:|`[^`]+`", re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_plain_words(page):
    assert VAGUE.findall(IN_PAGES.sub("", page.read_text("utf-8"))) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_plain_words_in_docstrings_and_messages(source):
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = (getattr(part, "value", None) for part in parts)
        text = "".join(value if isinstance(value, str) else "_" for value in values)
        if " " in text:  # else a key or a name
            assert VAGUE.findall(IN_STRINGS.sub("", text)) == []


# --- Links and names ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_two_commands_exist(name):
    assert f"make {name} " in README.read_text("utf-8")
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_links_lead_somewhere_in_the_repository(page):
    """The site checks its own links; these are the ones that a reader of the repository follows."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not anchor or "docs/api" in target.as_posix():  # whose headings are made from docstrings
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
    anchors = (re.sub(r"[^\w\- ]", "", x.lower()).strip().replace(" ", "-") for x in headings)
    return anchor in anchors


def test_the_extras_that_pages_name_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = "".join(page.read_text("utf-8") for page in (*PROSE, *ROOT.glob("examples/*.py")))
    named = re.findall(r"""["']\.\[([a-z,-]+)\]["']""", text)
    assert named
    assert {x for names in named for x in names.split(",")} <= {*project["optional-dependencies"]}


def test_public_names_are_sorted_and_in_the_reference():
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert names == sorted(set(names))
    pages = (ROOT / "docs" / "api").glob("*.md")
    named = re.findall(r"^::: keras_headmask\.(\S+)$", "".join(map(Path.read_text, pages)), re.M)
    assert set(names) - set(named) == set()


def test_every_kind_is_in_the_language_table():
    kinds = re.findall(r'^@register_spec\("\w+"\)\n(?:@.*\n)*class (\w+)', CODE, re.MULTILINE)
    assert len(kinds) > 10
    _, _, table = PAGES["concepts"].partition("## The whole language")
    documented = set(re.findall(r"\b([A-Z][A-Za-z]+)\(", table))
    assert set(kinds) - {"And", "Or", "Not"} - documented == set()


def test_every_finding_is_explained():
    codes = re.search(r"Codes: (.*?)\n\n", CODE, re.DOTALL)[1]
    codes = re.findall(r"`[a-z-]+`", codes)
    assert codes
    assert [code for code in codes if f"| {code} |" not in PAGES["look_and_lint"]] == []


# --- Architecture ---------------------------------------------------------------------------------

ABOUT_CODE = ("docs/architecture.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_every_path_and_function_that_is_named_exists(page):
    text = (ROOT / page).read_text("utf-8")
    paths = set(re.findall(r"[\w./]*\w(?:\.py|\.json|\.md|/)(?![\w/.])", text)) - {"site/"}
    functions = re.findall(r"`(\w+)\(\)`", text)
    assert len(paths) >= 10
    assert functions
    assert [path for path in sorted(paths) if not is_there(path)] == []
    assert [name for name in functions if not re.search(rf"\bdef {name}\(", CODE)] == []
    for name, file in re.findall(r"`(\w+)\(\)`\s+in\s+`([\w/]+\.py)`", text):
        assert f"def {name}(" in (PACKAGE / file).read_text("utf-8"), file


def is_there(path):
    """As seen from the root, from the package or from `docs/`; a name alone: anywhere in it."""
    if any((home / path).exists() for home in (ROOT, PACKAGE, ROOT / "docs")):
        return True
    return "/" not in path and any(PACKAGE.rglob(path))


def test_the_folders_and_the_arrows_are_those_that_are_checked():
    above, _, _ = PAGES["architecture"].partition("<!-- kernels:start -->")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", above, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows} == ARROWS


# --- Bugs that `make test` catches ----------------------------------------------------------------


def test_planted_bugs_are_edits_of_this_code_and_stand_in_the_table():
    bugs = tomllib.loads((ROOT / "tests" / "planted.toml").read_text("utf-8"))["bug"]
    texts = [(PACKAGE / bug["file"]).read_text("utf-8").count(bug["right"]) for bug in bugs]
    assert [bug["name"] for bug, n in zip(bugs, texts, strict=True) if n != 1] == []
    rows = [f"| {x['name']} | `{x['file']}` | `{x['test']}` |" for x in bugs]
    table = (ROOT / "tests" / "README.md").read_text("utf-8").partition("<!-- bugs -->")[2]
    assert [row for row in rows if row not in table] == []
    for path, _, name in (bug["test"].partition("::") for bug in bugs):
        assert f"def {name}(" in (ROOT / "tests" / path).read_text("utf-8"), name
