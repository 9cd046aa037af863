"""Real servers of ssh, of this user and with keys of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or ""


@dataclass
class Servers:
    """Servers of ssh by their address, and the command that reaches them."""

    folder: Path
    port: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd separates its privileges
        for name in ("host", "id"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, timeout=20)

    @property
    def ssh(self) -> str:
        options = {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": str(self.folder / "known"),
            "Port": self.port,
        }
        key = ["-i", str(self.folder / "id"), "-F", "/dev/null"]
        return shlex.join(["ssh", *key, *(f"-o{name}={value}" for name, value in options.items())])

    def start(self, address: str, prefix: Sequence[str] = ()) -> None:
        """Start the server of an address, by what `prefix` starts it with."""
        config = self.folder / f"{address}.conf"
        lines = {
            "ListenAddress": f"{address}:{self.port}",
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "id.pub",
            "PasswordAuthentication": "no",
            "UsePAM": "no",
            "StrictModes": "no",
            "PidFile": "none",
        }
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self.running[address] = subprocess.Popen([*prefix, SSHD, "-D", "-f", str(config)])

    def stop(self, address: str) -> None:
        """End the server of an address."""
        process = self.running.pop(address)
        process.terminate()
        process.wait(10)

    def close(self) -> None:
        """End all that run."""
        for address in list(self.running):
            self.stop(address)
