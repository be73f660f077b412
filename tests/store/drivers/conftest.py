"""Fixtures of the hdfs3 driver's tests."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.store.drivers.fake_libhdfs3 import FakeLibhdfs3


def unload_hdfs3() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "hdfs3"]:
        del sys.modules[name]


@pytest.fixture
def clean_hdfs3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep hdfs3, which remembers the library it loaded, and the user's Hadoop out of the other tests."""
    for name in [n for n in os.environ if n.startswith(("HADOOP_", "LIBHDFS3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    unload_hdfs3()
    yield
    unload_hdfs3()


@pytest.fixture
def library(clean_hdfs3: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibhdfs3]:
    """The stand-in, loaded whenever hdfs3 asks for libhdfs3; at the end nothing was leaked or crashed."""
    if find_spec("hdfs3") is None:
        pytest.skip("hdfs3 is not installed")
    stand_in = FakeLibhdfs3()
    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", lambda name: stand_in)
    yield stand_in
    assert stand_in.crashes == []
    assert stand_in.readers == {}
    assert len(stand_in.allocated) == stand_in.connections
