"""Fixtures of Iceberg tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.tables.iceberg.lakes import Lake


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    """A new warehouse with a catalog, which ``iceberg://lake/`` names."""
    made = Lake(tmp_path / "lake")
    made.configure(monkeypatch)
    yield made
    made.catalog.close()
