"""The configuration that libhdfs3 gets: the site's files and options, checked, as a bad value ends the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pqcache.errors import UsageError
from pqcache.store.drivers.hdfs3 import Hdfs3Source, settings
from tests.store.drivers.fake_libhdfs3 import FakeLibhdfs3

pytestmark = pytest.mark.usefixtures("clean_hdfs3")
URL = "hdfs://nn:8020"


def paths(source: Hdfs3Source) -> list[str]:
    return sorted(file.path for file in source.list())


def test_the_configuration_that_the_library_gets(library: FakeLibhdfs3, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    given = {"input.read.max.retry": "007", "dfs.my.own": "Some Thing"}
    source = Hdfs3Source("hdfs://nn/wh", given, 12)
    assert paths(source) == ["a"]
    assert library.address == ("nn", 8020, "me")
    expected = {
        "rpc.client.timeout": "6000",  # an RPC takes twice its timeout
        "rpc.client.connect.timeout": "6000",
        "rpc.client.connect.retry": "1",
        "input.read.timeout": "12000",
        "input.read.max.retry": "7",
        "dfs.client.read.shortcircuit": "false",
        "dfs.client.log.severity": "FATAL",
        "dfs.my.own": "Some Thing",
    }
    assert {name: library.configured.get(name) for name in expected} == expected
    source.close()
    source = Hdfs3Source("hdfs://you:pw@nn:9000/wh", {})
    assert paths(source) == ["a"]
    assert library.address == ("nn", 9000, "you")
    assert "pw" not in source.url
    source.close()


BAD = [
    ("rpc.client.timeout", "abc"),
    ("rpc.client.timeout", ""),
    ("rpc.client.timeout", "30s"),
    ("rpc.client.timeout", "1.5"),
    ("rpc.client.timeout", "٣"),
    ("rpc.client.timeout", "99999999999"),
    ("rpc.client.connect.retry", "0"),
    ("input.read.max.retry", "-1"),
    ("dfs.client.failover.max.attempts", "-1"),
    ("dfs.default.blocksize", "128m"),
    ("dfs.default.blocksize", "1000"),
    ("dfs.client.read.shortcircuit", "yes"),
    ("dfs.client.log.severity", "LOUD"),
    ("hadoop.rpc.protection", "perhaps"),
    ("some.key", "a\0b"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_values_that_would_end_the_process_are_refused(name: str, value: str, library: FakeLibhdfs3) -> None:
    with pytest.raises(UsageError, match=name) as error:
        Hdfs3Source(f"{URL}/wh", {name: value})
    assert "\n" not in str(error.value)
    assert library.configured == {}


@pytest.mark.parametrize("options", [{"colour": "red"}, {"host": "x"}, {"token": "a", "ticket_cache": "b"}])
def test_unknown_and_conflicting_options_are_refused(options: dict[str, str], library: FakeLibhdfs3) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Hdfs3Source(f"{URL}/wh", options)


@pytest.mark.parametrize("url", ["hdfs:///x", "hdfs://a b/x", "hdfs://nn:x/y", "hdfs://nn:99999/y", "hdfs://:1/y"])
def test_a_url_without_a_usable_host(url: str, library: FakeLibhdfs3) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        Hdfs3Source(url, {})


def write_xml(path: Path, properties: dict[str, str], more: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(
        f"<property>\n <name>{name}</name>\n <!-- why --><value>\n{value}\n</value>\n</property>"
        for name, value in properties.items()
    )
    head = '<?xml version="1.0"?>\n<configuration xmlns:xi="http://www.w3.org/2001/XInclude">'
    path.write_text(f"{head}{lines}{more}</configuration>")


def test_ha_from_the_site_configuration(library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    write_xml(conf / "core-site.xml", {"fs.defaultFS": "hdfs://${dfs.nameservices}", "rpc.client.timeout": "1"})
    names = {"dfs.nameservices": "Lake", "dfs.ha.namenodes.Lake": "n1,n2", "empty.one": "", "user": "evil"}
    write_xml(conf / "hdfs-site.xml", names, '<xi:include href="more.xml"/>')
    write_xml(conf / "more.xml", {f"dfs.namenode.rpc-address.Lake.n{n}": f"h{n}.${{env.SITE}}:8020" for n in (1, 2)})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(conf))
    monkeypatch.setenv("SITE", "example.com")
    library.put("/wh/a", b"x")
    for url in ("hdfs:///wh", "hdfs://Lake/wh"):
        source = Hdfs3Source(url, {}, 10)
        assert paths(source) == ["a"]
        assert library.address[:2] == ("Lake", None)
        assert library.configured["dfs.namenode.rpc-address.Lake.n2"] == "h2.example.com:8020"
        assert library.configured["rpc.client.timeout"] == "5000"  # --timeout means what it says
        assert "empty.one" not in library.configured
        assert library.address[2] is None
        source.close()
    assert os.environ["HADOOP_CONF_DIR"] == str(conf)
    assert "LIBHDFS3_CONF" not in os.environ


def test_with_kerberos_hadoop_user_name_is_ignored(library: FakeLibhdfs3, monkeypatch: pytest.MonkeyPatch) -> None:
    library.tree["/wh"] = None
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    source = Hdfs3Source(f"{URL}/wh", {"hadoop.security.authentication": "kerberos"})
    assert paths(source) == []
    assert library.address[2] is None
    source.close()


@pytest.mark.parametrize("text", ["<configuration><property>", "", "<other/>"])
def test_a_broken_configuration_file_is_named(
    text: str, library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hdfs-site.xml").write_text(text)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"hdfs-site\.xml"):
        Hdfs3Source(f"{URL}/wh", {})


def test_the_librarys_own_configuration_is_checked_before_it_reads_it(
    library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBHDFS3_CONF", str(tmp_path / "mine.xml"))
    with pytest.raises(UsageError, match=r"mine\.xml.*LIBHDFS3_CONF"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {"rpc.client.max.idle": "soon"})
    with pytest.raises(UsageError, match=r"rpc\.client\.max\.idle"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {}, "<what/>")
    with pytest.raises(UsageError, match=r"mine\.xml"):
        Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.delenv("LIBHDFS3_CONF")
    (tmp_path / "hdfs-client.xml").write_text("no XML")  # it takes this one from the working directory
    with pytest.raises(UsageError, match=r"hdfs-client\.xml"):
        Hdfs3Source(f"{URL}/wh", {})


def test_of_several_values_the_first_counts(tmp_path: Path) -> None:
    configured = settings(URL, {"hadoop.rpc.protection": "privacy,authentication"}, 30)
    assert configured["hadoop.rpc.protection"] == "privacy"
