"""What the pages of docs/frameworks/ show runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pqcache.store.sync.command import sync
from tests.datasets import write_shop
from tests.test_docs import FRAMEWORK_PAGES, run_page


@pytest.mark.parametrize("page", FRAMEWORK_PAGES, ids=lambda page: page.name)
def test_what_a_page_of_a_framework_shows_runs(page: Path, tmp_path: Path) -> None:
    write_shop(tmp_path / "lake" / "shop", rows=600)
    sync(str(tmp_path / "lake" / "shop"), tmp_path / "cache" / "shop")
    run_page(page, tmp_path, "", {})  # nothing where a page has no programs, or only examples
