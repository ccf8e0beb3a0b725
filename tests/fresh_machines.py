"""Set-up, page and tests on fresh Debian and Ubuntu systems in chroots: `make test-machines`, as root.

`FRESH_MACHINES` names the folder of the chroots, which are kept. The outputs of all commands are stored in it, too. The
engine for 64-bit ARM is cross-compiled and run in an emulator. With `--page PORT`, inside of a chroot, the program runs
`make run` until the page answers, then interrupts it.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("FRESH_MACHINES", "/var/tmp/fresh-machines"))
USER, USER_ID = "visitor", 1000
UBUNTU = "UBUNTU_MIRROR"  # environment variable with the address of a mirror
REPOSITORIES = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
SETTINGS = re.compile(r"(PIP_|SSL_CERT_|REQUESTS_CA|NODE_EXTRA|OMP_|https?_proxy)", re.IGNORECASE)
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NotTested(Exception):
    """The machine lacks a requirement of a condition; the message names it."""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "").strip()


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

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    def create(self) -> None:
        """Install the system, its packages and the program. Raises `NotTested`."""
        if not (self.path / "etc/created").exists():
            mirror, options = _mirror(self)
            checked("debootstrap", "--variant=minbase", *options, self.release, str(self.path), *mirror)
            (self.path / "etc/created").touch()
        shutil.copy("/etc/resolv.conf", self.path / "etc/resolv.conf")
        self.install(self.packages)
        for file in filter(Path.is_file, _files_of_settings()):
            (self.path / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.path / file.relative_to("/"))
        if self.account == USER:
            self.run(f"id {USER} || useradd --create-home --uid {USER_ID} {USER}", "root", folder="/")
        checkout = self.path / self.checkout.lstrip("/")
        checkout.mkdir(parents=True, exist_ok=True)
        pack = "git ls-files -z | tar -c --null -T - | tar -x -m --no-same-owner -C"
        checked("sh", "-c", f"cd {shlex.quote(str(ROOT))} && {pack} {shlex.quote(str(checkout))}")
        if self.account == USER:
            checked("chown", "-R", f"{USER_ID}:{USER_ID}", str(self.path / self.home.lstrip("/")))

    def install(self, packages: Sequence[str]) -> None:
        if not packages:
            return
        install = shlex.join(["apt-get", "install", "-y", "--no-install-recommends", *packages])
        clean = "env -i PATH=$PATH DEBIAN_FRONTEND=noninteractive"  # the certificates are not yet in their files
        command = f"{clean} dpkg --configure -a && {clean} apt-get update && {clean} {install}"
        result = self.run(command, "root", folder="/")
        if result.code:
            raise NotTested(f"packages are not installable: {result.last_line}")

    def run(
        self,
        command: str,
        account: str = "",
        *,
        folder: str = "",
        network: bool = True,
        read_only: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a shell command in a namespace with own processes and mounts."""
        account = account or self.account
        setup = [f"mount -t proc proc {self.path}/proc", f"mount --rbind /dev {self.path}/dev", "umask 022"]
        setup += [] if network else ["ip link set lo up"]
        for local in filter(Path.is_dir, _files_of_settings()):
            inside = self.path / local.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            setup.append(f"mount --bind -o ro {local} {inside}")
        for name in read_only:
            inside = shlex.quote(str(self.path / name.lstrip("/")))
            setup.append(f"mount --bind {inside} {inside} && mount -o remount,ro,bind {inside}")
        variables = {
            "HOME": "/root" if account == "root" else self.home,
            "PATH": SEARCH_PATH,
            "LANG": "C.UTF-8",
            "CI": "true",
            **{name: value for name, value in os.environ.items() if SETTINGS.match(name)},
            **_pip_settings(),
            **(environment or {}),
        }
        assigned = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items())])
        inner = f"cd {shlex.quote(folder or self.checkout)} && {command}"
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
            timeout=7200.0,
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


def _mirror(system: System) -> tuple[list[str], list[str]]:
    """Return address and script of a mirror, and options of debootstrap."""
    if shutil.which("debootstrap") is None:
        raise NotTested("debootstrap is missing: apt install debootstrap")
    if system.name != "ubuntu":
        return [debian_mirror()], []
    if not (mirror := os.environ.get(UBUNTU)):
        raise NotTested(f"no mirror is known: set {UBUNTU}")
    keys = sorted(FOLDER.glob("*/usr/share/keyrings/ubuntu-archive-keyring.gpg"))
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


BASIC = ("make", "python3", "python3-venv")
BROWSER = ("build-essential", "chromium-headless-shell", "iproute2")
HOME = f"/home/{USER}"
PROGRAM = f"{HOME}/specdemo"
SYSTEMS = {
    system.name: system
    for system in (
        System("debian-12", "bookworm", "3.11", (*BASIC, *BROWSER), "root", "/root/specdemo"),
        System("debian-13", "trixie", "3.13", (*BASIC, "ubuntu-keyring"), USER, f"{HOME}/a folder/specdemo"),
        System("ubuntu", "noble", "3.12", (*BASIC, "build-essential"), USER, PROGRAM),
    )
}
PAGE = "python3 tests/fresh_machines.py --page 7999"
SMOKE = (
    "make test ARGS='tests/test_packaging.py tests/test_generate.py "
    "tests/e2e/test_first_visit.py::test_the_first_visit_explains_a_recorded_step_and_the_second_races'"
)
KERNELS = """make test ARGS=tests/models/test_native_engine.py &&
make test-exhaustive ARGS=tests/models/test_vector_widths.py"""
EMPTY = """python3 -m venv "$HOME/empty" && "$HOME/empty/bin/pip" install -q . && cd / &&
"$HOME/empty/bin/specdemo" run "def f(n):" --pair bundled --max-tokens 8"""


@dataclass(frozen=True)
class Condition:
    """A command on a system with further `packages`. `refused`: it may end with a sentence instead of success."""

    system: str
    name: str
    command: str
    network: bool = True
    refused: bool = False
    read_only: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    packages: Sequence[str] = ()


CONDITIONS = [
    Condition("debian-12", "root", "make setup"),
    Condition("debian-12", "page", PAGE),
    Condition("debian-12", "tests with a browser", SMOKE),
    Condition("debian-12", "fast tests", "make test-fast"),
    Condition("debian-12", "no network: page", PAGE, network=False),
    Condition("debian-12", "no network: fast tests", "make test-fast", network=False),
    Condition("debian-12", "AVX2: kernels", KERNELS, environment={"SPECDEMO_VECTORS": "avx2"}),
    Condition("debian-13", "user, path with spaces, no compiler", "make setup"),
    Condition("debian-13", "page", PAGE),
    Condition("debian-13", "pip install . in an empty environment", EMPTY),
    Condition("debian-13", "a compiler added: fast tests", "make test-fast", packages=("build-essential",)),
    Condition("ubuntu", "user", "make setup"),
    Condition("ubuntu", "page", PAGE),
    Condition("ubuntu", "fast tests", "make test-fast"),
    Condition("ubuntu", "home read-only: page", PAGE, refused=True, read_only=(HOME,)),
    Condition("ubuntu", "program read-only: page", PAGE, refused=True, read_only=(PROGRAM,)),
    Condition("ubuntu", "/tmp read-only: page", PAGE, refused=True, read_only=("/tmp",)),
    Condition("ubuntu", "all of them read-only: page", PAGE, refused=True, read_only=(HOME, "/tmp", "/var/tmp")),
    Condition("ubuntu", "program read-only, no set-up", f"VENV=$HOME/other {PAGE}", refused=True, read_only=(PROGRAM,)),
]


# --- runs inside of a chroot ---

PATHS = ("/", "/health", "/lessons")


def open_page(port: str) -> int:
    """Return 0 if all paths answer and the page ends without a traceback."""
    command = ["make", "run", f"ARGS=--port {port}"]
    program = subprocess.Popen(command, stdout=-1, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    lines: list[str] = []
    for line in program.stdout:
        lines.append(line)
        if line.startswith("specdemo is ready"):
            break
    else:
        print("".join(lines[-30:]))
        return program.wait() or 1
    answers = [answer(f"http://127.0.0.1:{port}{path}") for path in PATHS]
    os.killpg(program.pid, signal.SIGINT)
    rest = program.communicate(timeout=60)[0]
    print(*map(" ".join, zip(PATHS, answers, strict=True)), rest[-1000:], sep="\n")
    return int(set(answers) != {"200"} or "Traceback" in rest)


def answer(url: str) -> str:
    """Return the status, with the cause of a failure; a page that loads its models is requested again."""
    for _ in range(10):
        try:
            with urlopen(url, timeout=120) as response:
                return str(response.status)
        except HTTPError as error:
            status = f"{error.code} {error.read(200).decode(errors='replace')}"
            if error.code != 503:
                break
    return status


# --- 64-bit ARM ---

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PASSES = """
import ctypes, platform, random, sys
from dataclasses import replace
import numpy as np
from fakes.native_fuzz import Cache, RandomModel, Rows, main, random_shape
from specdemo.native.formats import FORMATS
from fakes import native_fuzz
from fakes.native_fuzz import Cache, RandomModel, Rows, random_shape
from specdemo.native.interface import FORMATS
from specdemo.native.interface import Result, declare

assert platform.machine() == "aarch64"
library, rng = ctypes.CDLL(sys.argv[1]), random.Random(1)
declare(library)
assert library.self_check() == 0
for form in [*FORMATS] * 3:
    model = RandomModel(library, replace(random_shape(rng, form), fused=0))
    together, alone = Cache(model, 48), Cache(model, 48)
    ids = [rng.randrange(model.shape.vocab) for _ in range(17)]
    rows = Rows(together, ids, 0)
    assert rows.run() == Result.DONE
    for i, token in enumerate(ids):
        single = Rows(alone, [token], i, threads=1)
        assert single.run() == Result.DONE
        np.testing.assert_array_equal(rows.logits[i], single.logits[0])
main(sys.argv[1], 1, 3)
print(f"rows of {len(FORMATS)} number formats have the bits of single rows; random and hostile passes are safe")
"""


def arm_passes() -> Result:
    """Compare rows, and run random and hostile passes, with Python and numpy for ARM. Raises `NotTested`."""
    from specdemo.native.interface import DIGEST

    for program, package in ((COMPILER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            raise NotTested(f"{program} is missing: apt install {package}")
    library, system = FOLDER / "native-aarch64.so", FOLDER / "debian-12-arm64"
    flags = ("-std=gnu11", "-O2", "-fPIC", "-pthread", "-march=armv8-a", f"-DINTERFACE_DIGEST={DIGEST}", "-shared")
    sources = map(str, sorted((ROOT / "specdemo/native").glob("*.c")))
    checked(COMPILER, *flags, *sources, "-o", str(library), "-lm")
    if not (system / "etc/created").exists():
        options = ["--arch=arm64", "--foreign", "--variant=minbase", "--include=python3,python3-numpy"]
        checked("debootstrap", *options, "bookworm", str(system), debian_mirror())
        for package in sorted(system.glob("var/cache/apt/archives/*.deb")):  # extracted, but never started
            checked("dpkg-deb", "-x", str(package), str(system))
        (system / "etc/created").touch()
    of_system = system / "usr/lib/aarch64-linux-gnu"
    search = f"LD_LIBRARY_PATH={of_system}/blas:{of_system}/lapack"
    modules = ":".join(map(str, (ROOT, ROOT / "tests", system / "usr/lib/python3/dist-packages")))
    options = ["-L", str(system), "-E", search, "-E", f"PYTHONPATH={modules}", "-E", "PYTHONDONTWRITEBYTECODE=1"]
    command = [EMULATOR, *options, str(system / "usr/bin/python3"), "-c", PASSES, str(library)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return Result(done.returncode, done.stdout)


def outcome_of(condition: Condition) -> str:
    system = SYSTEMS[condition.system]
    try:
        create_once(system.name)
        system.install(condition.packages)
    except NotTested as reason:
        return f"not tested: {reason}"
    options = {"network": condition.network, "read_only": condition.read_only, "environment": condition.environment}
    result = system.run(condition.command, **options)
    name = "".join(c if c.isalnum() else "-" for c in condition.name)
    (FOLDER / f"{system.name}-{name}.log").write_text(result.output, "utf-8")
    if "Traceback (most recent call last)" in result.output and " passed" not in result.last_line:
        return f"failed: traceback: {result.last_line}"
    if result.code == 0:
        return f"passed: {result.last_line}"
    return f"{'refused' if condition.refused else 'failed'}, exit code {result.code}: {result.last_line}"


@cache
def create_once(name: str) -> None:
    SYSTEMS[name].create()


def tested(systems: Sequence[str], part: str) -> Iterator[tuple[str, str, str]]:
    """Test the conditions of `systems` with `part` in their names; yield system, condition and result."""
    for condition in CONDITIONS:
        if condition.system in systems and part in condition.name:
            system = SYSTEMS[condition.system]
            yield f"{system.name}, Python {system.python}, {system.account}", condition.name, outcome_of(condition)
    if "arm" in systems:
        try:
            result = arm_passes()
            outcome = f"{'failed' if result.code else 'passed'}: {result.last_line}"
        except NotTested as reason:
            outcome = f"not tested: {reason}"
        yield "64-bit ARM, emulated", "random passes", outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--systems", nargs="*", default=[*SYSTEMS, "arm"], choices=[*SYSTEMS, "arm"])
    parser.add_argument("--only", default="", help="part of the name of conditions")
    parser.add_argument("--page", metavar="PORT", help="open the page in this folder, and do nothing else")
    options = parser.parse_args(arguments)
    if options.page:
        return open_page(options.page)
    if os.geteuid():
        print("chroots need root: run the program with sudo", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in tested(options.systems, options.only):
        rows.append(row)
        print(*row, sep=" | ", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"\nCommit {commit}:\n\n| system | condition | result |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(row[-1].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
