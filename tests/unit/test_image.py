"""The container image's recipe: what it is made of, who it runs as, and how it is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "image/Containerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("cpu", "cuda")

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """Each with its words, lines that go on joined and comments left out."""
    lines = [line for line in RECIPE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def stages() -> dict[str, list[Instruction]]:
    """Instructions by stage, without those of the stages that it starts from."""
    found: dict[str, list[Instruction]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.split(" AS ")[1]] = []
        if found:
            [*found.values()][-1].append((word, rest))
    return found


def whole(stage: str) -> list[Instruction]:
    """What the image of a stage has: its own instructions after those of where it starts from."""
    own = stages()[stage]
    base = own[0][1].split(" AS ")[0]
    return [*(whole(base) if base in stages() else []), *own[1:]]


def last(stage: str, word: str) -> str:
    return [rest for each, rest in whole(stage) if each == word][-1]


def from_context() -> set[str]:
    """What is copied of the checkout."""
    copied = [rest.split() for word, rest in instructions() if word == "COPY"]
    found: set[str] = set()
    for words in copied:
        if not words[0].startswith("--from="):
            found |= {word.rstrip("/") for word in words[:-1]}
    return found


def told_environment(stage: str) -> dict[str, str]:
    pairs = [re.findall(r"(\w+)=(\S+)", rest) for word, rest in whole(stage) if word == "ENV"]
    return {name: value for each in pairs for name, value in each}


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_the_charts_user_with_the_environment_on_the_path(target: str) -> None:
    chart = (ROOT / "k8s/chart/templates/_pod.tpl").read_text()
    uid, gid = (re.findall(rf"{name}: (\d+)", chart)[0] for name in ("runAsUser", "runAsGroup"))
    assert last(target, "USER") == f"{uid}:{gid}"
    made = next(rest for word, rest in whole(target) if word == "RUN")
    assert f"groupadd --gid {gid} " in made
    assert f"useradd --uid {uid} --gid {gid} " in made
    assert told_environment(target)["PATH"] == "/opt/loomserve/bin:${PATH}"


@pytest.mark.parametrize("target", TARGETS)
def test_arguments_are_a_whole_command(target: str) -> None:
    assert json.loads(last(target, "ENTRYPOINT")) == ["tini", "--"]
    assert json.loads(last(target, "CMD")) == ["loomserve", "serve", "/etc/loomserve/config.yaml"]
    assert last(target, "EXPOSE") == "8000"


@pytest.mark.parametrize("target", TARGETS)
def test_what_it_writes_is_declared_and_is_what_the_chart_mounts(target: str) -> None:
    declared = json.loads(last(target, "VOLUME"))
    chart = (ROOT / "k8s/chart/templates/_pod.tpl").read_text()
    mounted = set(re.findall(r"mountPath: (\S+?)[,}]", chart))
    assert set(declared) | {"/dev/shm"} <= mounted
    told = told_environment(target)
    for name in ("HOME", "LOOMSERVE_HOME", "USER"):
        assert f"{{name: {name}, value: {told[name]}}}" in chart
    assert told["HOME"].startswith(declared[1])


@pytest.mark.parametrize("target", TARGETS)
def test_both_targets_are_installed_by_the_installer_and_take_nothing_else_of_it(
    target: str,
) -> None:
    ((word, rest),) = stages()[f"installed-{target}"][1:]
    mounted, command = re.match(r"((?:--mount=\S+ )*)(.*)", rest).groups()  # type: ignore[union-attr]
    assert (word, command) == ("RUN", f"DEVICE={target} image/install.sh")
    # Where packages come from is in no layer and no history.
    assert set(re.findall(r"--mount=type=(\w+)", mounted)) == {"secret"}
    copied = [rest for word, rest in whole(target) if word == "COPY"]
    assert copied == [f"--from=installed-{target} /opt/loomserve /opt/loomserve"]


def test_packages_come_by_the_projects_pins_alone() -> None:
    script = (ROOT / "image/install.sh").read_text()
    assert "PURPOSE=serve" in script
    assert "scripts/install.sh\n" in script
    everything = RECIPE.read_text() + script
    assert not re.search(r"pip install|uv pip|curl|wget|https?://|ftp://", everything)
    assert [word for word, _ in instructions() if word == "ADD"] == []
    # What the installer reads to check each file is there.
    assert {"pyproject.toml", "constraints.txt", "hashes.txt", "overrides.txt"} <= from_context()


def test_only_sources_are_copied_and_all_packages_are() -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".containerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    # All is left out, but for what is copied: .git, .venv, models, results and what is to come.
    assert allowed[0] == "*"
    assert allowed[-1] == "**/__pycache__"
    named = set(allowed[1:-1])
    assert named == from_context()
    assert {(ROOT / name).exists() for name in named} == {True}
    packages = PROJECT["tool"]["setuptools"]["package-dir"].values()
    assert set(packages) <= named


def test_a_base_can_be_given_and_names_no_registry() -> None:
    assert instructions()[0] == ("ARG", "BASE=python:3.11-slim-bookworm")
    bases = {rest.split(" AS ")[0] for word, rest in instructions() if word == "FROM"}
    assert bases - set(stages()) == {"${BASE}"}


def test_the_charts_values_name_the_images_that_are_built() -> None:
    version = PROJECT["project"]["version"]
    for site in (ROOT / "k8s/values").glob("*/site.yaml"):
        device = "cuda" if "gpu" in site.parent.name else "cpu"
        assert yaml.safe_load(site.read_text())["image"]["tag"] == f"{version}-{device}"
    chart = yaml.safe_load((ROOT / "k8s/chart/Chart.yaml").read_text())
    assert chart["appVersion"] == version
    values = yaml.safe_load((ROOT / "k8s/chart/values.yaml").read_text())
    assert f"ray[serve]=={values['rayVersion']}" in PROJECT["project"]["dependencies"]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with what the scripts need, and no tool that builds images."""
    for name in ("bash", "basename", "cat", "date", "dirname", "git", "grep", "sed"):
        path = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout
        (tmp_path / name).symlink_to(path.strip())
    return tmp_path


def script(tools: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    ours = {"DEVICE", "IMAGE", "IMAGE_BASE", "IMAGE_OPTIONS", "IMAGE_TOOL"}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(
        [ROOT / "image" / name],
        env={**environment, "PATH": str(tools), **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def builder(tools: Path, name: str, rest: str = "") -> None:
    """A tool that says what it was asked."""
    path = tools / name
    path.write_text(f'#!/bin/bash\n{rest}\nprintf "%s\\n" "{name} $*"\n')
    path.chmod(0o755)


def test_without_a_tool_the_build_says_what_to_install(tools: Path) -> None:
    result = script(tools, "build.sh")
    assert result.returncode == 1
    assert result.stderr.startswith("build: there is no podman, buildah or docker that works here")
    assert result.stderr.count("\n") == 1


def test_without_a_tool_the_check_is_skipped_with_the_reason(tools: Path) -> None:
    result = script(tools, "check.sh")
    assert result.returncode == 0
    assert result.stdout.startswith("check: skipped, there is no podman, buildah or docker")


def test_a_docker_without_its_daemon_is_no_tool(tools: Path) -> None:
    builder(tools, "docker", "[[ $1 != version ]] || exit 1")
    assert script(tools, "build.sh").returncode == 1
    builder(tools, "buildah")
    assert " with buildah in " in script(tools, "build.sh").stdout


def test_a_build_is_told_the_target_the_base_and_more(tools: Path) -> None:
    builder(tools, "podman")
    result = script(
        tools,
        "build.sh",
        DEVICE="cuda",
        IMAGE_BASE="example.com/base:1",
        IMAGE_OPTIONS="--secret=id=pip,src=/a --no-cache",
    )
    assert result.returncode == 0, result.stderr
    version = PROJECT["project"]["version"]
    (asked,) = re.findall(r"^podman build (.*) \.$", result.stdout, re.M)
    assert asked.startswith(
        f"--file image/Containerfile --target cuda --tag localhost/loomserve:{version}-cuda "
        f"--build-arg VERSION={version} --build-arg REVISION="
    )
    assert asked.endswith(
        "--build-arg BASE=example.com/base:1 --format docker --secret=id=pip,src=/a --no-cache"
    )


def test_an_unknown_device_is_refused(tools: Path) -> None:
    result = script(tools, "build.sh", DEVICE="tpu")
    assert result.stderr == "build: DEVICE is 'tpu'; set it to cpu or cuda.\n"


def bill() -> dict[str, Any]:
    """Of this environment, and of no Debian packages."""
    module = "import json, sys; sys.path.insert(0, sys.argv[1]); import sbom; "
    made = (
        "found = [sbom.python_component(each) for each in sbom.distributions()]; "
        "found += sbom.debian_components(sys.stdin.read(), 'debian'); "
        "json.dump(sbom.bill(found), sys.stdout)"
    )
    listed = "ii \tlibc6:amd64\t2.36-9+deb12u14\tamd64\nrc \told\t1\tall\nii \tdash\t1:2-3\tamd64\n"
    said = subprocess.run(
        [sys.executable, "-c", module + made, ROOT / "image"],
        input=listed,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parsed: dict[str, Any] = json.loads(said)
    return parsed


def test_the_bill_lists_pythons_packages_and_debians() -> None:
    found = bill()
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    refs = [component["bom-ref"] for component in found["components"]]
    assert refs == sorted(set(refs))
    named = {component["purl"] for component in found["components"]}
    ray = next(pin for pin in PROJECT["project"]["dependencies"] if pin.startswith("ray["))
    assert f"pkg:pypi/ray@{ray.partition('==')[2]}" in named
    assert {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64",
        "pkg:deb/debian/dash@1%3A2-3?arch=amd64",
    } <= named
    assert not any("/old@" in purl for purl in named)
