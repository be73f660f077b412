"""The wheel and the sdist, installed without extras into empty environments, do what the package is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pqcache.versions import __version__
from tests import ROOT
from tests.datasets import write_shop

pytestmark = pytest.mark.xdist_group("package")  # one worker makes the environment, for all tests here
OFFLINE = ("No matching distribution", "Could not find a version", "NewConnectionError", "ConnectTimeout")
EXTRAS = "torch", "botocore", "hdfs_native", "fsspec", "requests", "fastparquet", "distributed", "pandas"


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that sees neither the checkout nor the environment of the tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    if "pip" in words and done.returncode and any(text in done.stderr for text in OFFLINE):
        pytest.skip(f"NOT CHECKED: pip cannot reach an index: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done


def pip(python: Path) -> list[object]:
    """Return the words that run pip, this environment's, for another one: one of its own takes long to make."""
    return [sys.executable, "-m", "pip", "--python", python]


def link_dependencies(python: Path) -> None:
    """Link what the installed pqcache requires without extras, from here: to download it takes long.

    What it imports and does not require is not found.
    """
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    (pqcache,) = metadata.distributions(name="pqcache", path=[str(site)])
    wanted, known = list(pqcache.requires or []), {"pqcache"}
    while wanted:
        requirement = Requirement(wanted.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in known or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(name)
        found = metadata.distribution(name)
        assert found.version in requirement.specifier, f"{name} {found.version} does not satisfy {requirement}"
        wanted += found.requires or []
        parts = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for part in parts:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(found.locate_file(part))).resolve())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An empty environment with the build tool in it, the wheel and the sdist."""
    work = tmp_path_factory.mktemp("package")
    run(sys.executable, "-m", "venv", "--without-pip", work / "venv", cwd=work)
    python = work / "venv" / "bin" / "python"
    run(*pip(python), "install", "-q", "--no-compile", "hatchling>=1.25", cwd=work)
    run(python, "-m", "hatchling", "build", "-d", work / "dist", cwd=ROOT)
    (wheel,) = (work / "dist").glob("*.whl")
    (sdist,) = (work / "dist").glob("*.tar.gz")
    return python, wheel, sdist


@pytest.mark.deep  # installs into an environment of its own, and runs the demo
@pytest.mark.slow
def test_the_wheel_works_without_extras(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    python, wheel, sdist = built
    run(*pip(python), "install", "-q", "--no-compile", "--no-deps", wheel, cwd=tmp_path)
    link_dependencies(python)
    write_shop(tmp_path / "shop", days=2, files=1, rows=50)
    pqcache = python.parent / "pqcache"
    assert "100 rows" in run(pqcache, "sync", "shop", "cache", cwd=tmp_path).stdout
    assert "100 rows" in run(pqcache, "inspect", "cache", cwd=tmp_path).stdout
    assert "no damage" in run(pqcache, "verify", "cache", "--deep", cwd=tmp_path).stdout
    demo = run(pqcache, "demo", cwd=tmp_path).stdout
    assert "torch is not installed" in demo
    assert demo.count("\n  -> ") == 17
    assert "\n 17. a sync without changes fetches nothing" in demo
    report = run(pqcache, "--version", "-v", cwd=tmp_path).stdout
    assert "not installed" in report.partition("torch ")[2].splitlines()[0]
    code = (
        "import pqcache, sys; pqcache.sync('cache'); pqcache.inspect('cache'); pqcache.verify('cache', deep=True);"
        f"print(sum(b.num_rows for b in pqcache.Cache.open('cache').batches(batch_size=32)),"
        f"sorted(set({EXTRAS!r}) & set(sys.modules)), pqcache.__file__)"
    )
    rows, loaded, where = run(python, "-c", code, cwd=tmp_path).stdout.split()
    assert (rows, loaded) == ("100", "[]")
    assert Path(where).is_relative_to(python.parent.parent)
    assert "pqcache[s3]" in subprocess.run([pqcache, "inspect", "s3://b/x"], capture_output=True, text=True).stderr
    for page in ("man1/pqcache.1", "man1/pqcache-sync.1", "man5/pqcache.toml.5"):
        assert (python.parent.parent / "share" / "man" / page).is_file()
    if shutil.which("man"):
        env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        found = subprocess.run(["man", "-w", "pqcache-sync"], capture_output=True, text=True, env=env)
        assert found.stdout.strip() == str(python.parent.parent / "share" / "man" / "man1" / "pqcache-sync.1")
    run(*pip(python), "uninstall", "-q", "-y", "pqcache", cwd=tmp_path)
    run(*pip(python), "install", "-q", "--no-deps", "--no-build-isolation", sdist, cwd=tmp_path)
    assert "nothing to do" in run(pqcache, "sync", "cache", cwd=tmp_path).stdout


def test_every_file_names_this_version() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"pqcache-{__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text()


def test_the_archives_have_what_they_should(built: tuple[Path, Path, Path]) -> None:
    _, wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "pqcache/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "docs/"))]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "constraints.txt"}
    wanted |= {"tools/man.py"}
    assert wanted <= inside
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "man").glob("man?/*")} <= inside
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.*")} <= inside
