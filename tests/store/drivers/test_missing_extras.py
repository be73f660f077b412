"""A store whose client is not installed names the extra to install, and pqcache itself needs none of them."""

from __future__ import annotations

import sys

import pytest

from pqcache.errors import UsageError
from pqcache.store.drivers.registry import open_source


@pytest.mark.parametrize(
    ("scheme", "library", "extra"),
    [
        ("s3", "botocore", "s3"),
        ("hdfs", "hdfs_native", "hdfs"),
        ("webhdfs", "requests", "hdfs"),
        ("webhdfs", "fsspec", "hdfs"),
        ("gs", "obstore", "gcs"),
        ("abfss", "obstore", "azure"),
        ("sftp", "fsspec", "http"),
    ],
)
def test_a_missing_client_is_named_with_its_extra(
    scheme: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    for driver in ("s3", "hdfs", "webhdfs", "object_store"):
        monkeypatch.delitem(sys.modules, f"pqcache.store.drivers.{driver}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    reason, advice = r"needs .*", rf"install .*pip install 'pqcache\[{extra}\]'"
    with pytest.raises(UsageError, match=rf"^{scheme}://127.0.0.1:1/x: {reason}; {advice}$") as error:
        open_source(f"{scheme}://127.0.0.1:1/x")
    assert library.replace("_", "-") in error.value.reason
