"""The installer's refusals, its stamp, and the files that list dependencies."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
INPUTS = ("pyproject.toml", "constraints.txt", "hashes.txt", "overrides.txt")
TOOLS = (
    *("awk", "bash", "cat", "cut", "df", "dirname", "du", "env", "flock", "g++", "grep", "mkdir"),
    *("printf", "python3", "rm", "sed", "sha256sum", "tail", "uname"),
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal_name(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def direct_dependencies() -> dict[str, set[str]]:
    groups = {"Runtime": PROJECT["dependencies"]}
    groups |= {
        heading: PROJECT["optional-dependencies"][extra]
        for heading, extra in (
            ("CPU", "cpu"),
            ("CUDA", "cuda"),
            ("Audio", "audio"),
            ("Development", "dev"),
        )
    }
    return {heading: {normal_name(line) for line in lines} for heading, lines in groups.items()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the installer reads, and a PATH folder with the tools that it needs."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/install.sh", folder / "scripts")
    for name in INPUTS:
        shutil.copy(ROOT / name, folder)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in TOOLS:
        # The interpreter itself: the python3 on PATH may be a version manager's script.
        found = os.path.realpath(sys.executable) if tool == "python3" else shutil.which(tool)
        assert found is not None, tool
        (bin_folder / tool).symlink_to(found)
    return folder


def command(checkout: Path, name: str, script: str) -> None:
    path = checkout.parent / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def install(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))
    }
    environment |= {"PATH": str(checkout.parent / "bin"), "DEVICE": "cpu", **variables}
    return subprocess.run(
        [checkout / "scripts/install.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def fingerprint(checkout: Path) -> str:
    text = f"cpu\ndevelop\n{checkout}\n".encode()
    return hashlib.sha256(
        text + b"".join((checkout / name).read_bytes() for name in INPUTS)
    ).hexdigest()


@pytest.mark.parametrize(
    ("name", "script", "message"),
    [
        ("g++", None, "there is no C++ compiler"),
        ("python3", None, "there is no Python 3.11, 3.12 or 3.13 on PATH"),
        ("python3", "echo 'python3: command not found' >&2; exit 127", "there is no Python 3.11"),
        ("python3", 'case "$2" in *ensurepip*) exit 1;; esac', "cannot make virtual environments"),
        ("uname", "echo Darwin", "Darwin on Darwin is not supported"),
        ("df", "printf 'head\\ndisk 9 9 3145728 9 /\\n'", "there are 3 GB free"),
    ],
)
def test_the_installer_refuses_in_one_sentence(
    checkout: Path, name: str, script: str | None, message: str
) -> None:
    if script is None:
        (checkout.parent / "bin" / name).unlink()
    else:
        command(checkout, name, script)
    result = install(checkout)
    assert result.returncode == 1
    assert result.stderr.startswith("install: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [("DEVICE", "tpu", "cpu or cuda"), ("PURPOSE", "play", "develop or serve")],
)
def test_an_unknown_setting_is_refused(checkout: Path, name: str, value: str, known: str) -> None:
    result = install(checkout, **{name: value})
    assert (result.returncode, result.stderr) == (
        1,
        f"install: {name} is '{value}'; set it to {known}.\n",
    )


def test_without_a_network_the_installer_says_so_and_leaves_no_stamp(checkout: Path) -> None:
    # Port 9 on this machine: nothing listens, so the connection is refused at once.
    result = install(
        checkout,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
    )
    assert result.returncode == 1
    assert "install: the package index cannot be reached; connect to the network" in result.stderr
    assert "uv ... failed" in result.stdout
    assert not (checkout / ".venv/install.stamp").exists()


@pytest.mark.parametrize("changed", [None, "device", "purpose", *INPUTS])
def test_only_a_changed_input_starts_a_new_installation(
    checkout: Path, changed: str | None
) -> None:
    loomserve = checkout / ".venv/bin/loomserve"
    loomserve.parent.mkdir(parents=True)
    loomserve.touch(mode=0o755)
    (checkout / ".venv/install.stamp").write_text(fingerprint(checkout) + "\n")
    if changed in INPUTS:
        with (checkout / changed).open("a") as file:
            file.write("# changed\n")
    # Without a compiler an installation ends as soon as it has begun.
    (checkout.parent / "bin/g++").unlink()
    result = install(
        checkout,
        DEVICE="cuda" if changed == "device" else "cpu",
        PURPOSE="serve" if changed == "purpose" else "develop",
    )
    assert result.returncode == (0 if changed is None else 1)
    assert ("C++ compiler" in result.stderr) == (changed is not None)
    assert result.stdout == ""


@pytest.mark.parametrize("broken", [False, True])
def test_changed_files_are_compiled_even_where_nothing_is_to_install(
    checkout: Path, broken: bool
) -> None:
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (checkout / ".venv/bin/loomserve").touch(mode=0o755)
    (checkout / ".venv/install.stamp").write_text(fingerprint(checkout) + "\n")
    for name in ("platform", "kvstore"):
        (checkout / name).mkdir()
        (checkout / name / "changed.py").write_text("SIZE = 1\n")
    (checkout / "platform/other.py").write_text("SIZE =\n" if broken else "SIZE = 2\n")
    result = install(checkout)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    compiled = {path.name.split(".")[0] for path in checkout.rglob("*.pyc")}
    assert compiled == ({"changed"} if broken else {"changed", "other"})
    assert len(list(checkout.rglob("changed.*.pyc"))) == 2


def test_every_direct_dependency_has_a_reason_and_every_reason_a_dependency() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    documented = {
        section.split()[0]: {
            normal_name(name) for name in re.findall(r"^\| `(.+?)` \|", section, re.M)
        }
        for section in page.split("\n## ")[1:]
    }
    assert documented == direct_dependencies()


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    odd = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==(\d+!)?[\w.]+", pin)]
    assert odd == [], "a local build or a file's address cannot be installed elsewhere"
    pinned = {normal_name(pin) for pin in pins}
    assert len(pinned) == len(pins)
    # The device decides which build of torch is right.
    assert set().union(*direct_dependencies().values()) - pinned == {"torch"}
    assert {normal_name(line) for line in PROJECT["dependencies"]} <= pinned


def test_every_pinned_version_has_hashes() -> None:
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    (torch,) = (
        line for line in PROJECT["optional-dependencies"]["cpu"] if line.startswith("torch==")
    )
    entries = re.findall(
        r"^(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        (ROOT / "hashes.txt").read_text(),
        re.M,
    )
    assert sorted(version for version, _ in entries) == sorted([*pins, torch])


def test_the_cuda_compiler_is_of_the_runtimes_release() -> None:
    # Else cuda/atomic and others fail: "CUDA compiler and CUDA toolkit headers are incompatible".
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    compiler = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-nvrtc")
    releases = {name: pinned[name].split(".")[:2] for name in ("nvidia-cuda-runtime", *compiler)}
    assert releases == dict.fromkeys(releases, releases["nvidia-cuda-runtime"])


def test_make_help_shows_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.M)
    assert phony is not None
    shown = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(re.findall(r"^  make (\S+) ", shown, re.M)) == set(phony[1].split())
