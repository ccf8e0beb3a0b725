"""Chroots of Debian and Ubuntu with a copy of the tracked files, and commands inside of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER, USER_ID = "visitor", 1000
UBUNTU = "UBUNTU_MIRROR"  # environment variable with the address of a mirror
REPOSITORIES = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
SETTINGS = re.compile(r"(PIP_|SSL_CERT_|REQUESTS_CA|NODE_EXTRA|OMP_|https?_proxy)", re.IGNORECASE)
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NotTested(Exception):
    """The machine lacks a requirement of a condition; the message names it."""


@dataclass(frozen=True)
class System:
    """A release in a chroot, used by one account. `checkout`: folder of the program."""

    name: str
    release: str
    python: str
    packages: Sequence[str]
    account: str
    checkout: str

    @property
    def home(self) -> str:
        return "/root" if self.account == "root" else f"/home/{self.account}"


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "").strip()


@dataclass(frozen=True)
class Chroot:
    """A created system below `folder`."""

    system: System
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / self.system.name

    def create(self) -> None:
        """Install the system, its packages and the program. Raises `NotTested`."""
        if not (self.path / "etc/created").exists():
            mirror, options = _mirror(self.system, self.folder)
            checked("debootstrap", "--variant=minbase", *options, self.system.release, str(self.path), *mirror)
            (self.path / "etc/created").touch()
        shutil.copy("/etc/resolv.conf", self.path / "etc/resolv.conf")
        self.install(self.system.packages)
        for file in _files_of_settings():
            if file.is_file():
                (self.path / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.path / file.relative_to("/"))
        if self.system.account == USER:
            self.run(f"id {USER} || useradd --create-home --uid {USER_ID} {USER}", "root", folder="/")
        self._copy_program()

    def install(self, packages: Sequence[str]) -> None:
        """Install Debian packages. Raises `NotTested`."""
        if not packages:
            return
        install = shlex.join(["apt-get", "install", "-y", "--no-install-recommends", *packages])
        clean = "env -i PATH=$PATH DEBIAN_FRONTEND=noninteractive"  # the certificates are not yet in their files
        result = self.run(
            f"{clean} dpkg --configure -a && {clean} apt-get update && {clean} {install}", "root", folder="/"
        )
        if result.code:
            raise NotTested(f"packages are not installable: {result.last_line}")

    def _copy_program(self) -> None:
        checkout = self.path / self.system.checkout.lstrip("/")
        checkout.mkdir(parents=True, exist_ok=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        packed = subprocess.run(
            ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=listed, stdout=-1, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-m", "-C", str(checkout), "--no-same-owner"], input=packed, check=True)
        if self.system.account == USER:
            checked("chown", "-R", f"{USER_ID}:{USER_ID}", str(self.path / self.system.home.lstrip("/")))

    def run(
        self,
        command: str,
        account: str = "",
        *,
        folder: str = "",
        network: bool = True,
        read_only: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 7200.0,
    ) -> Result:
        """Run a shell command in a namespace with own processes and mounts."""
        account = account or self.system.account
        at = {name: str(self.path / name) for name in ("proc", "sys", "dev", "dev/shm")}
        setup = [f"mount -t proc proc {at['proc']}", f"mount --rbind /dev {at['dev']}", "umask 022"]
        setup += [] if network else ["ip link set lo up"]
        for local in filter(Path.is_dir, _files_of_settings()):
            inside = self.path / local.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            setup.append(f"mount --bind -o ro {local} {inside}")
        for name in read_only:
            inside = shlex.quote(str(self.path / name.lstrip("/")))
            setup.append(f"mount --bind {inside} {inside} && mount -o remount,ro,bind {inside}")
        variables = {
            "HOME": "/root" if account == "root" else self.system.home,
            "PATH": SEARCH_PATH,
            "LANG": "C.UTF-8",
            "CI": "true",
            **{name: value for name, value in os.environ.items() if SETTINGS.match(name)},
            **_pip_settings(),
            **(environment or {}),
        }
        assigned = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items())])
        inner = f"cd {shlex.quote(folder or self.system.checkout)} && {command}"
        user = "" if account == "root" else f"--userspec={USER_ID}:{USER_ID} "
        setup.append(f"exec {assigned} chroot {user}{self.path} /bin/sh -c {shlex.quote(inner)}")
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        done = subprocess.run(
            [*spaces, "/bin/sh", "-ec", "\n".join(setup)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
        return Result(done.returncode, done.stdout)


def checked(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["no output"]
        raise NotTested(f"{command[0]} failed: {lines[-1]}")


def debian_mirror() -> str:
    """Return the mirror that apt uses on this machine."""
    listed = subprocess.run(REPOSITORIES, capture_output=True, text=True).stdout.split()
    mirrors = [address for address in listed if address.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise NotTested("apt has no Debian mirror on this machine")
    return mirrors[0]


def _mirror(system: System, folder: Path) -> tuple[list[str], list[str]]:
    """Return address and script of a mirror, and options of debootstrap."""
    if shutil.which("debootstrap") is None:
        raise NotTested("debootstrap is missing: apt install debootstrap")
    if system.name != "ubuntu":
        return [debian_mirror()], []
    if not (mirror := os.environ.get(UBUNTU)):
        raise NotTested(f"no mirror is known: set {UBUNTU}")
    keys = sorted(folder.glob("*/usr/share/keyrings/ubuntu-archive-keyring.gpg"))
    if not keys:
        raise NotTested("the keys of Ubuntu are missing: Debian 13 contains them, so create it first")
    return [mirror, "/usr/share/debootstrap/scripts/gutsy"], [f"--keyring={keys[0]}", "--components=main,universe"]


def _pip_settings() -> dict[str, str]:
    done = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True)
    settings = re.findall(r"^global\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)
    return {f"PIP_{name.replace('-', '_').upper()}": value for name, value in settings}


def _files_of_settings() -> Iterator[Path]:
    """Yield the local files and folders that the settings of package managers name."""
    for value in {**dict(filter(lambda item: SETTINGS.match(item[0]), os.environ.items())), **_pip_settings()}.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            known = path.is_absolute() and path.exists() and path != Path("/")
            if known and not (path.is_dir() and path.is_relative_to("/etc")):  # part of every system
                yield path.parent if path.name == "simple" else path
