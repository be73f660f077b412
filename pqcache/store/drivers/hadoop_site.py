"""Finds and reads Hadoop's configuration files as Hadoop's own clients do."""

from __future__ import annotations

import os
import re
from xml.etree import ElementInclude, ElementTree

from pqcache.errors import UsageError

_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")


def site_configuration() -> dict[str, str]:
    """Return the properties in core-site.xml and hdfs-site.xml, with variables replaced; the last value counts.

    The files are in HADOOP_CONF_DIR, else in HADOOP_HOME/etc/hadoop; without either there are no properties.
    """
    return with_variables_replaced(site_files())


def site_files() -> dict[str, str]:
    """Return the properties in the site's files, with ``${variables}`` as they are written."""
    home = os.environ.get("HADOOP_HOME")
    directory = os.environ.get("HADOOP_CONF_DIR") or (os.path.join(home, "etc", "hadoop") if home else "")
    values: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml") if directory else ():
        values.update(read_xml(os.path.join(directory, name)))
    return values


def with_variables_replaced(values: dict[str, str]) -> dict[str, str]:
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
    """Return the properties in a Hadoop configuration file; a file that is not there has none.

    ``strict`` refuses what libhdfs3's own reader cannot parse. With ``missing``, a file that is not there raises
    UsageError with that as its advice. A file that cannot be read, or is none of Hadoop's, raises UsageError.
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
        raise UsageError(path, str(error), "it must be readable XML") from error
    if root.tag != "configuration" or (
        strict and any(item.tag != "property" or not item.findtext("name") for item in root)
    ):
        raise UsageError(path, "not a Hadoop configuration file: <configuration> with <property> in it")
    return {
        name: (item.findtext("value") or "").strip()
        for item in root.iter("property")
        if (name := (item.findtext("name") or "").strip())
    }
