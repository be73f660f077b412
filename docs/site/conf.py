"""The site that ``make docs`` builds with Sphinx: README, docs/, benchmarks/ and the reference of the Python API.

The pages are those that a forge shows; nothing is written for the site alone but api.rst, and the contents below.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pqcache.versions import __version__  # noqa: E402


class StandIn(types.ModuleType):
    """A module of torch where torch is not installed: the pages show names of its classes and nothing else."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__, "__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, made)
        return made


if importlib.util.find_spec("torch") is None:  # it would be most of the download, and the pages only need its names
    parts = "torch", "torch._utils", "torch.autograd", "torch.autograd.profiler", "torch.distributed", "torch.utils"
    for part in (*parts, "torch.utils.data"):
        sys.modules[part] = StandIn(part)
        above, _, below = part.rpartition(".")
        if above:
            setattr(sys.modules[above], below, sys.modules[part])

project, author, release = "pqcache", "The pqcache authors", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist", "pqcache", "tests", "examples", "tools", "man"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"OnEvent": "OnEvent"}
autodoc_member_order = "bysource"
smartquotes_action = "D"  # dashes, and no quotes: they are often those of a shell
python_maximum_signature_line_length = 80
html_theme = "furo"
html_title = f"pqcache {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_permalinks_icon = "#"
pygments_style, pygments_dark_style = "friendly", "github-dark"

CONTENTS = {
    "Begin": ["docs/quick-start", "docs/migrating", "docs/README"],
    "Every night": ["docs/nightly", "docs/operating", "docs/contracts", "docs/snapshots"],
    "Sources": ["docs/sources", "docs/hdfs", "docs/stores"],
    "Tables": ["docs/tables", "docs/hive"],
    "Many nodes and small disks": ["docs/partial-copies", "docs/serve", "docs/repartition"],
    "Training": ["docs/training", "docs/loading", "docs/new-data", "docs/proof", "docs/frameworks/README"],
    "Which rows": ["docs/splits", "docs/packing", "docs/transforms", "docs/keys", "docs/gpus"],
    "Reference": ["docs/commands/README", "docs/python", "docs/site/api", "docs/json", "docs/cache-format",
                  "ARCHITECTURE", "benchmarks/README", "CHANGELOG", "CONTRIBUTING", "SECURITY"],
}  # fmt: skip
TITLES = {"docs/commands/README": "Commands", "docs/README": "All pages"}  # other than the pages' own
BELOW = {  # the pages that a page leads to in the contents
    "docs/commands/README": sorted(
        f"docs/commands/{path.stem}" for path in (ROOT / "docs" / "commands").glob("*.md") if path.stem != "README"
    ),
    "docs/frameworks/README": sorted(
        f"docs/frameworks/{path.stem}" for path in (ROOT / "docs" / "frameworks").glob("*.md") if path.stem != "README"
    ),
    "benchmarks/README": ["benchmarks/HISTORY"],
}


def toctree(names: list[str], caption: str = "") -> str:
    """Return a part of the contents, which is shown beside the pages."""
    entries = (f"{TITLES[name]} </{name}>" if name in TITLES else f"/{name}" for name in names)
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return "\n\n```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Add the contents to the pages that have some below them."""
    if name == root_doc:
        source[0] += "".join(toctree(names, caption) for caption, names in CONTENTS.items())
    elif name in BELOW:
        source[0] += toctree(BELOW[name])


def as_definitions(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn the tables of parameters of a docstring into definition lists: ``name``, spaces, what it means."""
    found: list[str] = []
    inside = False
    for line in lines:
        if match := re.match(r"(\s*)((?:``[^`]+``(?:, )?)+)\s{2,}(\S.*)", line):
            found += ["", match[1] + match[2], f"{match[1]}    {match[3]}"]
            inside = True
        elif inside and line.startswith("        "):
            found.append("    " + line.strip())
        else:
            found += ["", line] if inside and line.strip() else [line]
            inside = False
    lines[:] = found


def with_names(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Show a function that is a default by its name."""
    return (re.sub(r"<function (\w+)>", r"\1", signature), returns) if signature else None


def add_index(app: Any, exception: Exception | None) -> None:
    """Let the page of README be the first one that a server shows."""
    if exception is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    """Connect the functions above, and name the languages of blocks that are no languages."""
    from pygments.lexers import BashLexer, TextLexer

    app.add_lexer("crontab", TextLexer)
    app.add_lexer("sh", BashLexer)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", as_definitions)
    app.connect("autodoc-process-signature", with_names)
    app.connect("build-finished", add_index)
