"""The datasets that the oracle reads: made once, as files, as a cache of these, and rewritten by a repartition."""

from __future__ import annotations

import pytest

import pqcache
from tests.epoch.tables import Source, write_kinds, write_narrow, write_wide


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The tables of `tables`, each as files, "NAME cache" and "NAME repartitioned"; and "wide dense"."""
    root, found = tmp_path_factory.mktemp("epoch"), {}
    for name, write in (("kinds", write_kinds), ("narrow", write_narrow), ("wide", write_wide)):
        files = write(root / name)
        found[name] = Source(files, files)
        for how in ("cache", "repartitioned", *(["dense"] if name == "wide" else [])):
            path = root / f"{name} {how}"
            pqcache.sync(files, path)
            if how != "cache":
                dense = ["vector"] if how == "dense" else None
                pqcache.repartition(path, row_group_size="4MB" if name == "wide" else "100KB", dense=dense)
            found[f"{name} {how}"] = Source.of_cache(path)
    return found


@pytest.fixture
def narrow(sources: dict[str, Source]) -> Source:
    """The cache of a few kinds, which is opened sooner."""
    return sources["narrow cache"]


@pytest.fixture
def kinds(sources: dict[str, Source]) -> Source:
    """The cache of every kind."""
    return sources["kinds cache"]


@pytest.fixture(autouse=True)
def _many_workers(few_cores_are_fine: None) -> None:
    """There may be more workers than cores."""
