"""What MkDocs asks while it builds the site: which files belong to it, and what the tutorial shows.

The site has the layout of the repository, so a relative link leads to the same page on both. Its pages are all Markdown
files of the root, `docs/` and `studies/`, with the files that they link to. The tutorial is executed; a cell that fails
ends the build.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import plotly
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from plotly.io import to_html

ROOT = Path(__file__).parent.parent
NOTEBOOK = "docs/tutorial.ipynb"
LINK = re.compile(r"\]\(([^)\s#]+)")
FIGURE = "application/vnd.plotly.v1+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""Bold and italics of a terminal, which a kernel asks for."""
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
"""Served by the site itself: no page fetches anything from elsewhere."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site: those of the theme, the repository's pages with what they link to, the tutorial."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("studies/**/*.md")}
    linked = {(page.parent / target).resolve() for page in pages for target in LINK.findall(page.read_text("utf-8"))}
    paths = {path.relative_to(ROOT).as_posix(): str(path) for path in {*pages, *filter(Path.is_file, linked)}}
    made = [File.generated(config, name, abs_src_path=path) for name, path in paths.items() if name != NOTEBOOK]
    tutorial = File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=tutorial_page())
    script = File.generated(config, f"docs/{PLOTLY.name}", abs_src_path=str(PLOTLY))
    return Files([*theme, *made, tutorial, script])


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to the notebook lead to the page that shows its outputs."""
    return markdown.replace("tutorial.ipynb)", "tutorial.md)")


def tutorial_page() -> str:
    """Execute the notebook in an empty folder and return it as Markdown, with what its cells print and draw.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(ROOT / NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}})
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `otb` of this environment is
        client.execute(env=os.environ | {"PATH": path, "COLUMNS": "80"})  # tables that fit a page
    return "\n\n".join(part for cell in notebook.cells for part in cell_parts(cell))


def cell_parts(cell: nbformat.NotebookNode) -> list[str]:
    """Return a cell as Markdown: its text or its code, then its outputs without progress (stderr)."""
    if cell.cell_type == "markdown":
        return [cell.source]
    shell = cell.source.startswith("%%bash\n")
    source = cell.source.removeprefix("%%bash\n")
    printed = ANSI.sub("", "".join(output.text for output in cell.outputs if output.get("name") == "stdout"))
    parts = [f"```{'bash' if shell else 'python'}\n{source}\n```", *([f"```text\n{printed}\n```"] if printed else [])]
    for output in cell.outputs:
        data = output.get("data", {})
        if FIGURE in data:
            parts.append(to_html(data[FIGURE], include_plotlyjs=PLOTLY.name, full_html=False, default_height=420))
        elif "text/html" in data:
            parts.append(data["text/html"])
        elif "text/plain" in data:
            parts.append(f"```text\n{data['text/plain']}\n```")
    return parts
