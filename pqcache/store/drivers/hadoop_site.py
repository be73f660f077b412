"""Hadoop's configuration files, found and read as Hadoop's own clients do."""

from __future__ import annotations

import os
import re
from xml.etree import ElementInclude, ElementTree

from pqcache.errors import UsageError

_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")


def site_configuration() -> dict[str, str]:
    """Return what core-site.xml and hdfs-site.xml say, the last one that has a key, variables replaced.

    They are in HADOOP_CONF_DIR, else in HADOOP_HOME/etc/hadoop; without either there are none.
    """
    return replaced(site_files())


def site_files() -> dict[str, str]:
    """Return the properties of the site's files as they are written."""
    home = os.environ.get("HADOOP_HOME")
    directory = os.environ.get("HADOOP_CONF_DIR") or (os.path.join(home, "etc", "hadoop") if home else "")
    values: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml") if directory else ():
        values.update(read_xml(os.path.join(directory, name)))
    return values


def replaced(values: dict[str, str]) -> dict[str, str]:
    """Return properties with ``${variables}`` replaced by other properties, or by ``${env.NAME}``."""
    found = dict(values)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return os.environ.get(name[4:], "") if name.startswith("env.") else found.get(name, match[0])

    for name in found:
        for _ in range(20):  # as deep as Hadoop goes
            found[name] = _VARIABLE.sub(value_of, before := found[name])
            if found[name] == before:
                break
    return found


def read_xml(path: str, *, strict: bool = False, missing: str = "") -> dict[str, str]:
    """Return the properties in a Hadoop configuration file; one that is not there has none.

    ``strict`` takes nothing that libhdfs3's own reader would not survive. ``missing`` says what to do about a
    file that is not there, where it must be.
    """
    try:
        root = ElementTree.parse(path).getroot()
        if not strict:
            ElementInclude.include(root, base_url=path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if missing:
            raise UsageError(path, "no such file", missing) from error
        return {}
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise UsageError(path, f"{error}", "it must be readable XML") from error
    if root.tag != "configuration" or (
        strict and any(item.tag != "property" or not item.findtext("name") for item in root)
    ):
        raise UsageError(path, "not a Hadoop configuration file: <configuration> with <property> in it")
    return {
        name: (item.findtext("value") or "").strip()
        for item in root.iter("property")
        if (name := (item.findtext("name") or "").strip())
    }
