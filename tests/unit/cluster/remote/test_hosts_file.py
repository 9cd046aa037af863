"""Files of hosts: what is read, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.remote.hosts_file import Host, WrongHosts, read_hosts


def test_hosts_with_what_they_offer(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\n\nnode-1\nme@node-2 cpus=16 gpus=8 address=10.0.0.7  # the large one\n")
    assert read_hosts(path) == [Host("node-1"), Host("me@node-2", 16.0, 8.0, "10.0.0.7")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has 0 hosts"),
        ("a\nb\na cpus=2\n", ":3: a is there twice"),
        ("-oProxyCommand=rm", ":1: '-oProxyCommand=rm' is not a host"),
        ("a slots=4", "'slots=4' is not known; write cpus=N, gpus=N or address=IP"),
        ("a cpus=many", "cpus=many: is not a number from 0 to 1000000"),
        ("a gpus=-1", "gpus=-1: is not a number from 0 to 1000000"),
        ("a cpus=nan", "cpus=nan: is not a number from 0 to 1000000"),
        ("a address=node-7", "address=node-7: is not an IPv4 address"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(WrongHosts, match=told.replace("*", ".")):
        read_hosts(tmp_path / "hosts")
