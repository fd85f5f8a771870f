"""What the site shows beside `docs/`: tutorials, and the files that pages link.

Pages link files as the repository holds them, so that the links work there, too. Those files join
the site under their paths in the repository, and the links are turned to them.
"""

import re
import sys
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from printed import printed_by

ROOT = Path(__file__).parents[1]
LINKED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/**/*.md",
    "benchmarks/results/**/*.json",
    "docs/images/*.png",
    "examples/*.py",
    "tests/README.md",
    "tests/serving/older_tensorflow.json",
)
# In the order in which a newcomer reads them; one that is missing is skipped.
TUTORIALS = (
    "masks_101",
    "multi_head_from_scratch",
    "hugging_face",
    "sentence_heads",
    "pretrained_bert",
    "know_your_heads",
    "two_berts",
    "longformer_heads",
    "streaming_heads",
    "pack_documents",
    "from_pytorch",
    "serve_bert",
)


def tutorials() -> list[Path]:
    return [path for name in TUTORIALS if (path := ROOT / f"examples/{name}.py").exists()]


def as_markdown(script: Path) -> str:
    """A script of jupytext's percent format as a page: text, code, and what the code printed."""
    cells = jupytext.read(script, fmt="py:percent").cells
    printed = iter(printed_by(script))
    parts = []
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"````python\n{cell.source}\n````")
        if output := next(printed):
            parts.append(f'````text title="prints"\n{output}\n````')
    if not parts[0].startswith("# "):
        parts.insert(0, f"# {script.stem.replace('_', ' ').capitalize()}")
    parts.append(f"---\n\nThis page is a script: [`examples/{script.name}`]({script.name}).")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return markdown if "/" in page.file.src_uri else with_links_of_the_site(markdown)


def with_links_of_the_site(markdown: str) -> str:
    """The site holds `docs/` and the root of the repository in one folder, tutorials as pages."""
    markdown = re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)
    for path in tutorials():
        markdown = markdown.replace(f"](examples/{path.name})", f"](examples/{path.stem}.md)")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """GitHub needs `\\|` for a bar in a table's code; Markdown here would show the backslash."""
    return re.sub(r"<td>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    for entry in config.nav:
        if "Tutorials" in entry:
            entry["Tutorials"] += [f"examples/{path.stem}.md" for path in tutorials()]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File(place, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in tutorials():
        page = f"examples/{path.stem}.md"
        files.append(File.generated(config, page, content=as_markdown(path)))
