"""File system types, from a table of mounts."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from pqcache.system import disk

TABLE = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:5 / /data\040lake rw - nfs4 host:/export rw
31 22 0:6 / /data rw - xfs /dev/vdb rw
32 31 0:7 / /data/fuse rw - fuse.s3fs s3fs rw
33 31 0:8 / /data/fuse rw master:1 - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "stable"),
    [
        ("/home/a", "ext4", True),
        ("/data lake/shop", "nfs4", False),
        ("/data/shop", "xfs", True),
        ("/datastore", "ext4", True),
        ("/data/fuse/x", "tmpfs", True),
    ],
)
def test_the_mount_that_a_path_lies_on(path: str, kind: str, stable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "open", lambda *_, **__: io.StringIO(TABLE.lstrip()))
    assert disk.file_system_type(path) == kind
    assert disk.has_stable_inodes(path) is stable


def test_a_system_without_the_table_has_no_stable_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", missing)
    assert disk.file_system_type("/") == ""
    assert not disk.has_stable_inodes("/")
