"""A database of its own for each test, in a metastore of this process or, with `make test-deep`, in a real one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.tables.hive_metastore.databases import Database, connected, make_database
from tests.store.tables.hive_metastore.fakes import FakeMetastore, metastore


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A new, empty database; see `IN_BOTH`."""
    if getattr(request, "param", "fake") == "real":
        hive = request.getfixturevalue("hive")
        with connected(hive) as client:
            yield make_database(client, hive.url, f"db{uuid.uuid4().hex[:12]}", tmp_path)
    else:
        fake = FakeMetastore()
        with metastore(fake) as port:
            yield make_database(fake, f"hive://127.0.0.1:{port}", "db", tmp_path)
