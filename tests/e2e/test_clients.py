"""Clients that people point at it, as they are shipped: a scripted session of each.

Those that are no dependency of the tests are installed into a folder of their own, from the package
registries, and skipped where these are not reached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform")]
SESSIONS = Path(__file__).parent / "clients"
_INSTALL_S = 300

Installed = Callable[[str, tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A folder with packages of PyPI ("python") or npm ("node")."""
    folders = dict[tuple[str, tuple[str, ...]], Path]()

    def install(language: str, packages: tuple[str, ...]) -> Path:
        found = folders.get((language, packages))
        if found is None:
            found = folders[language, packages] = tmp_path_factory.mktemp(language)
            _install(language, packages, found)
        return found

    return install


def _install(language: str, packages: tuple[str, ...], folder: Path) -> None:
    bin_folder = Path(sys.executable).parent
    if language == "python":
        commands = [
            [bin_folder / "uv", "venv", "--quiet", "--python", sys.executable, folder / "venv"],
            [bin_folder / "uv", "pip", "install", "--quiet", "--python",
             folder / "venv/bin/python", *packages],
        ]  # fmt: skip
    else:
        if shutil.which("npm") is None:
            pytest.skip("Node.js is not installed")
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        commands = [["npm", "install", *quiet, "--prefix", folder, *packages]]
    for command in commands:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        if ended.returncode:
            pytest.skip(f"{', '.join(packages)} cannot be installed: {ended.stderr[-300:]}")


def run(command: list[str | Path], folder: Path, *, ends: int = 0, **environment: str) -> str:
    """What it prints; it fails the test unless it ends with 0, or with what else it may."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        # It has no settings of whoever runs the tests.
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S + 120,
        check=False,
    )
    assert ended.returncode in {0, ends}, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.mark.parametrize("session", ["openai_sdk", "anthropic_sdk", "langchain_chat"])
def test_a_client_in_python(platform: Platform, session: str, tmp_path: Path) -> None:
    command = [sys.executable, SESSIONS / f"{session}.py", platform.url, platform.key, HOT]
    assert run(command, tmp_path).endswith("went through\n")


@pytest.mark.parametrize(
    ("session", "packages"),
    [
        ("llama_index_chat", ("llama-index-llms-openai-like",)),
        ("litellm_calls", ("litellm",)),
    ],
)
def test_a_client_in_python_that_is_installed(
    platform: Platform,
    installed: Installed,
    session: str,
    packages: tuple[str, ...],
    tmp_path: Path,
) -> None:
    python = installed("python", packages) / "venv/bin/python"
    command = [python, SESSIONS / f"{session}.py", platform.url, platform.key, HOT]
    said = run(command, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert said.endswith("went through\n")


@pytest.mark.parametrize("version", ["1.1.3", "1.4.4"])
def test_n8ns_client(
    platform: Platform, installed: Installed, version: str, tmp_path: Path
) -> None:
    """The package by which n8n's nodes ask stands in for n8n, which wants hundreds of MB.

    The first version is the one of n8n 2.0.0.
    """
    folder = installed("node", (f"@langchain/openai@{version}", "@langchain/core@1", "zod@4"))
    # Modules are looked for from where the script is.
    script = shutil.copy(SESSIONS / "langchain_js.mjs", folder)
    assert run(["node", script, platform.url, platform.key, HOT], tmp_path) == "went through\n"


def test_claude_code(platform: Platform, installed: Installed, tmp_path: Path) -> None:
    folder = installed("node", ("@anthropic-ai/claude-code@2",))
    (program,) = folder.glob("node_modules/@anthropic-ai/claude-code-linux-*/claude")
    said = run(
        [program, "--print", "Say hello.", "--model", COLD, "--output-format", "json",
         "--system-prompt", "You are brief.", "--tools", ""],
        tmp_path,
        ends=1,
        ANTHROPIC_BASE_URL=platform.url,
        ANTHROPIC_AUTH_TOKEN=platform.key,
        ANTHROPIC_SMALL_FAST_MODEL=COLD,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="128",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    result = json.loads(said)
    # It samples, and calls an answer an error that its own limit has cut: some do not end before.
    assert not result["is_error"] or "128 output token maximum" in result["result"], result
    assert result["usage"]["output_tokens"] > 0


def test_continue(platform: Platform, installed: Installed, tmp_path: Path) -> None:
    folder = installed("node", ("@continuedev/cli@1",))
    config = {
        "name": "test",
        "version": "1.0.0",
        "schema": "v1",
        "models": [
            {
                "name": COLD,
                "provider": "openai",
                "model": COLD,
                "apiBase": f"{platform.url}/v1",
                "apiKey": platform.key,
                "roles": ["chat"],
                "defaultCompletionOptions": {"maxTokens": 64, "contextLength": 8192},
            }
        ],
    }
    written = tmp_path / "config.yaml"
    written.write_text(json.dumps(config))
    program = folder / "node_modules/.bin/cn"
    said = run([program, "--print", "--config", written, "Say hello."], tmp_path)
    assert said.strip()


@pytest.fixture
def clines_home(tmp_path: Path) -> Iterator[Path]:
    """Cline leaves a daemon behind, which ends with the test."""
    yield tmp_path
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == str(tmp_path):
                process.kill()


def test_cline(platform: Platform, installed: Installed, clines_home: Path) -> None:
    folder = installed("node", ("@cline/cli-linux-x64@3.0.65",))
    program = folder / "node_modules/@cline/cli-linux-x64/bin/cline"
    provider = ("openai-compatible", "-m", COLD)
    run([program, "auth", "-p", *provider, "-k", platform.key, "-b", f"{platform.url}/v1"],
        clines_home)  # fmt: skip
    said = run(
        [program, "-P", *provider, "-s", "You are brief.", "--auto-approve", "false",
         "--timeout", "120", "--json", "Say hello."],
        clines_home,
        # It samples, and may still talk when its time is over.
        ends=1,
    )  # fmt: skip
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    texts = [line["event"].get("text") for line in lines if line["type"] == "agent_event"]
    assert any(texts), said[-2000:]
