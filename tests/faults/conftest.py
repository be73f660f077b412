"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.runner import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs pqcache under an instrument; see tests/faults/child.py."""
    found = Runner(tmp_path_factory.mktemp("runner"))
    yield found
    found.close()
