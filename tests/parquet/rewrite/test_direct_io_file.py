"""Files that grow at their end hold what was written, with and without the page cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet.rewrite import files
from pqcache.parquet.rewrite.files import WRITERS, DirectIoFile
from pqcache.system.disk import DIRECT_IO_BLOCK, checksum_of, new_checksum
from tests.examples import examples

SIZES = st.one_of(
    st.integers(0, 30),
    st.sampled_from(
        [DIRECT_IO_BLOCK - 1, DIRECT_IO_BLOCK, DIRECT_IO_BLOCK + 1, 3 * DIRECT_IO_BLOCK, 11 * DIRECT_IO_BLOCK + 7]
    ),
)
STEPS = st.lists(st.tuples(st.sampled_from(["write", "skip", "again"]), SIZES), max_size=9)


@pytest.mark.parametrize("use_page_cache", [False, True])
def test_bytes_holes_and_checksum(tmp_path: Path, use_page_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BUFFER", 2 * DIRECT_IO_BLOCK)
    monkeypatch.setattr(files, "_LARGE", DIRECT_IO_BLOCK)
    monkeypatch.setattr(files, "_TOGETHER", DIRECT_IO_BLOCK)
    path = tmp_path / "file"

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def check(steps: list[tuple[str, int]]) -> None:
        path.unlink(missing_ok=True)
        expected, checksum = b"", new_checksum()
        with ThreadPoolExecutor(WRITERS) as disk:
            file = DirectIoFile(path, disk, checksum, use_page_cache, fresh=True)
            for number, (step, size) in enumerate([*steps, ("write", 1)]):
                if step == "write":
                    data = bytes((number + n) % 251 for n in range(size))
                    file.write_all([data, data[:9], data])
                    expected += data + data[:9] + data
                elif step == "skip" and size:
                    file.skip(size)
                    file.write(b"x")  # something always follows
                    expected += bytes(size) + b"x"
                elif step == "again":
                    assert file.close() == checksum_of(path)
                    assert path.read_bytes() == expected
                    file = DirectIoFile(path, disk, checksum, use_page_cache, fresh=False)
            found = file.close()
        assert path.read_bytes() == expected
        assert found == checksum_of(path)

    check()


def test_holes_take_no_place(tmp_path: Path) -> None:
    with ThreadPoolExecutor(WRITERS) as disk:
        file = DirectIoFile(tmp_path / "file", disk, new_checksum(), False, fresh=True)
        file.write(b"a")
        file.skip(64 << 20)
        file.write(b"b")
        file.close()
    found = (tmp_path / "file").stat()
    assert found.st_size == (64 << 20) + 2
    assert found.st_blocks * 512 < 1 << 20
