"""Opens the file system of fsspec for a URL: which schemes there are, what to install, and which options it has."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from typing import Any

from pqcache.errors import UsageError
from pqcache.store.drivers.base import check_options
from pqcache.store.urls import is_secret, redact, url_scheme

# what is local, wraps another file system, or is better served by a driver of pqcache's own
_REFUSED = {
    "local": "use a path", "asynclocal": "use a path", "s3a": "use s3://", "viewfs": "use hdfs://",
    "arrow_hdfs": "use hdfs://", "adl": "use abfss://", "root": "mount it, and use a path",
    **dict.fromkeys(
        ("simplecache", "filecache", "blockcache", "cached", "reference", "dir", "generic", "async_wrapper",
         "asyncwrapper", "data", "zip", "tar", "libarchive", "dask", "pyscript", "git", "jlab", "jupyter"),
        "name the store itself",
    ),
}  # fmt: skip
_PARAMIKO = (
    "port", "username", "password", "key_filename", "passphrase", "timeout", "banner_timeout", "auth_timeout",
    "allow_agent", "look_for_keys", "compress", "gss_auth", "gss_kex", "gss_host", "host_key_policy",
)  # fmt: skip
_PASSED_ON = {"sftp": _PARAMIKO, "ssh": _PARAMIKO}  # options that a constructor takes without naming them
_OURS = {  # what no user has to set, and what has to be as it is
    "self", "args", "asynchronous", "loop", "use_listings_cache", "skip_instance_cache", "listings_expiry_time", "fs",
    "fo", "batch_size", "block_size", "cache_options", "cache_type", "default_cache_type", "default_fill_cache",
    "encoded", "get_client", "global_store", "same_scheme", "simple_links", "size_policy",
}  # fmt: skip
_OPENS = {"http": {"encoded": True, "simple_links": False}, "https": {"encoded": True, "simple_links": False}}
_ROOTS = {"http", "https"}  # whose paths are URLs

log = logging.getLogger("pqcache.store")


def schemes() -> list[str]:
    """Return the schemes for which fsspec knows an implementation, installed or not, in order."""
    from fsspec.registry import available_protocols

    return sorted(set(available_protocols()) - set(_REFUSED))


def is_known(url: str) -> bool:
    """Return whether fsspec has an implementation for ``url``; UsageError for one that is no store."""
    scheme = url_scheme(url)
    if scheme in _REFUSED:
        raise UsageError(redact(url), f"{scheme}:// is no store of its own", _REFUSED[scheme])
    return scheme in schemes()


def open_file_system(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """Return the file system of a URL, and the URL's path in it.

    A missing package, an unknown option or a malformed URL raises UsageError.
    """
    import fsspec

    scheme, shown = url_scheme(url), redact(url)
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        name = getattr(error, "name", "") or getattr(error.__cause__, "name", "") or known_class(scheme)
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(shown, f"needs {package}", f"install it with: pip install {package}") from error
    known = dict.fromkeys([*_parameters(kind), *_PASSED_ON.get(scheme, ())], "")
    check_options(f"{scheme}://", options, known)
    logging.getLogger(kind.__module__.partition(".")[0]).addHandler(logging.NullHandler())  # errors are reported once
    given = {**kind._get_kwargs_from_urls(url), **{name: parsed(name, value) for name, value in options.items()}}
    given = {**_OPENS.get(scheme, {}), **given, "use_listings_cache": False, "skip_instance_cache": True}
    if scheme in _PASSED_ON:  # its client would get them too
        del given["use_listings_cache"]
    try:
        made = kind(**given)
    except (TypeError, ValueError) as error:
        raise UsageError(shown, f"{kind.__name__} refuses its options", "check -o KEY=VALUE and the URL") from error
    path = str(kind._strip_protocol(url))
    return made, path.rstrip("/")


def known_class(scheme: str) -> str:
    """Return the name of the class that fsspec's registry has for a scheme."""
    from fsspec.registry import known_implementations

    return str(known_implementations[scheme]["class"])


def parsed(name: str, value: str) -> Any:
    """Return the value of an option: a number, a boolean or an object of JSON; a secret is a text unless an object.

    >>> parsed("port", "22"), parsed("anon", "True"), parsed("password", "22"), parsed("host", "x")
    (22, True, '22', 'x')
    """
    if value.lower() in ("true", "false"):
        value = value.lower()
    if is_secret(name) and value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _parameters(kind: type) -> list[str]:
    """Return the parameters that a class's constructor and those of its bases name."""
    names: dict[str, None] = {}
    for base in kind.__mro__[:-1]:
        made = base.__dict__.get("__init__")
        if made is None:
            continue
        for name, parameter in inspect.signature(made).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in _OURS:
                names[name] = None
    return list(names)
