"""The versions of pqcache, the platform and the libraries, for bug reports."""

from __future__ import annotations

__version__ = "0.1.0"

_LIBRARIES = ("pyarrow", "numpy", "typer")
_EXTRAS = (
    "hdfs-native",
    "fsspec",
    "requests",
    "hdfs3",
    "botocore",
    "obstore",
    "deltalake",
    "pyiceberg",
    "thrift",
    "torch",
    "torchdata",
    "fastparquet",
    "distributed",
)


def report() -> list[str]:
    """A line for each name and version, without importing the libraries."""
    import platform
    import sys

    found = [("pqcache", __version__), ("platform", platform.platform())]
    found += [("Python", f"{platform.python_version()} ({platform.python_implementation()})")]
    found += [("encoding", f"{sys.stdout.encoding}, files {sys.getfilesystemencoding()}")]
    found += [(name, _version_of(name)) for name in _LIBRARIES + _EXTRAS]
    return [f"{name:<12} {version}" for name, version in found]


def _version_of(name: str) -> str:
    from importlib import metadata  # here: every command imports this module first

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
