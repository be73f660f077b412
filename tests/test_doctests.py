"""The examples in docstrings run, each module's with a table and a cache of its own."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import pqcache
from tests.datasets import write_shop

PACKAGE = Path(pqcache.__file__).parent
NAMES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)
PUBLIC = [pqcache.sync, pqcache.repartition, pqcache.inspect, pqcache.verify, pqcache.gc, pqcache.log, pqcache.serve]


def module_of(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shop(tmp_path / "lake" / "shop", files=2, rows=100)
    monkeypatch.chdir(tmp_path)
    pqcache.sync("lake/shop", "cache/shop")
    failed, tried = doctest.testmod(module_of(name))
    assert tried
    assert failed == 0


def test_what_is_public_has_an_example_and_says_what_it_raises() -> None:
    from pqcache.torch import Batch, ParquetDataset, Prefetch, Ragged

    for thing in (*PUBLIC, pqcache.Cache.open, pqcache.Cache.batches, ParquetDataset, Prefetch, Ragged, Batch):
        assert ">>> " in (thing.__doc__ or ""), thing
        assert "+SKIP" not in (thing.__doc__ or "")
        if thing is not Batch:
            assert "raise" in (thing.__doc__ or "").lower(), thing
