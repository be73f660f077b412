"""The memory of a training stays within what was given and what the documentation adds, and does not grow."""

from __future__ import annotations

from pathlib import Path

import pytest

import pqcache
from tests.test_docs import ROOT

OVERHEAD = 300 << 20  # as docs/loading.md says
EPOCH = 16_000 * 8192


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is Linux's")
@pytest.mark.parametrize("workers", [0, 2])
def test_ten_epochs_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loader_limits

    loader_limits.large_rows(tmp_path / "large", 16_000)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = loader_limits.run("--child", "memory", tmp_path / "large", workers, "200MB")
    assert found["rows"] == 160_000
    assert found["window"] > 1
    peaks = found["peaks"]
    assert len(peaks) == 10
    assert max(peaks) <= found["idle"] + pqcache.parse_size("200MB") + OVERHEAD
    # keeping a quarter of each epoch would add more than an epoch's size from the first half to the second
    assert max(peaks[5:]) <= max(peaks[:5]) + EPOCH
    assert "at most 300 MB per rank" in (ROOT / "docs" / "loading.md").read_text()
