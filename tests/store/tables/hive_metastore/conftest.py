"""A database of its own in a real metastore for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.store.tables.hive_metastore.databases import Database, connected, make_database

if TYPE_CHECKING:
    from tests.servers.hive import Hive


@pytest.fixture
def database(hive: Hive, tmp_path: Path) -> Iterator[Database]:
    """A new, empty database of the metastore."""
    with connected(hive) as client:
        yield make_database(client, hive, f"db{uuid.uuid4().hex[:12]}", tmp_path)
