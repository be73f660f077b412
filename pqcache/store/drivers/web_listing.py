"""Whether the page that a web server answers with lists a directory.

A page without links to data may be an empty directory, or one with other files. It may also be a form for logging in,
which servers send with the status 200. That must not look as if everything in the directory had been deleted.
"""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

_PASSWORD = re.compile(rb"<input\b[^>]*\btype\s*=\s*[\"']?password", re.IGNORECASE)
_SAYS_SO = re.compile(rb"index of|directory listing|parent directory", re.IGNORECASE)
_LINK = re.compile(rb"<a\b[^>]*\bhref\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE)


def is_listing(page: bytes, url: str) -> bool:
    """Return whether a page without links to data is a listing of the directory ``url``, which ends in ``/``.

    It is one if it says so, as those of servers do, or has a link to the directory above, and asks for no password.

    >>> is_listing(b'<h1>Index of /lake/</h1>', 'http://host/lake/')
    True
    >>> is_listing(b'<a href="/">home</a> <a href="help.html">help</a>', 'http://host/lake/')
    False
    """
    if _PASSWORD.search(page):
        return False
    return _SAYS_SO.search(page) is not None or any(_is_above(link, url) for link in _LINK.findall(page))


def _is_above(link: bytes, url: str) -> bool:
    """Return whether a link leads to the directory above; one to the server's root counts only if it is relative."""
    text = link.decode(errors="replace")
    above = urlsplit(urljoin(url, "..")).path
    return (text.strip("./") == "" and ".." in text) or (above != "/" and urlsplit(urljoin(url, text)).path == above)
