"""The site of the documentation builds without a warning, has every page and every public name, and works offline.

It needs the extra `docs`, which `make docs` installs; `make check` runs that before this.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pqcache
import pqcache.torch
from tests import ROOT

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as `make docs` builds it: what it has built is not built again."""
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name, reason=f"NOT CHECKED: {name} is not installed; make docs installs it")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", "-d", "build/doctrees", ".", "build/site"]
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "site"


def test_it_has_every_page(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "benchmarks").glob("*.md")]
    for page in pages:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()
    contents = (site / "index.html").read_text()
    for page in pages:  # a page that no list of conf.py names would be an orphan, which -W refuses
        name = page.relative_to(ROOT).with_suffix(".html").as_posix()
        assert name == "README.html" or f'href="{name}' in contents, name


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("**/*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|source)[^>]*\bsrc=\"([^\"]+)\"|<link[^>]*\bhref=\"([^\"]+)\"", page.read_text()
        )
        assert not [url for pair in loaded for url in pair if re.match(r"(https?:)?//", url)], page
    for style in site.glob("**/*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text()), style
    assert "nightly" in (site / "searchindex.js").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "docs" / "site" / "api.html").read_text()
    found = set(re.findall(r"id=\"pqcache\.(\w+)\"", text)) | set(re.findall(r"id=\"pqcache\.errors\.(\w+)\"", text))
    found |= set(re.findall(r"id=\"pqcache\.torch\.(\w+)\"", text))
    public = {name for name in [*pqcache.__dir__(), *pqcache.torch.__all__] if not name.startswith("_")}
    assert {
        name for name in public if callable(getattr(pqcache, name, None) or getattr(pqcache.torch, name, None))
    } <= found
