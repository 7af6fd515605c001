"""``loomserve kube``: what it prints, and how it asks for what it cannot know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli.main import app
from loomserve.platform.config.loader import parse
from loomserve.platform.kubernetes.commands import environment_file, values_file
from loomserve.platform.kubernetes.pods import pod_environment

TEXT = """\
# With a comment: 'and "quotes"
devices: [{name: core0, cores: [0]}]

models: [{name: m, source: models/m, devices: [core0]}]
server: {host: 0.0.0.0, allow_unauthenticated: true}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("text", [TEXT, TEXT + "\n"])
def test_the_configuration_stands_in_the_values_as_it_is(text: str) -> None:
    read = yaml.safe_load(values_file(text, {"mode": "node", "nodes": [1]}))
    assert read == {"config": text, "mode": "node", "derived": {"mode": "node", "nodes": [1]}}


def test_sizes_of_weights_that_are_elsewhere_are_given(path: Path) -> None:
    done = CliRunner().invoke(app, ["kube", "values", str(path), "--weights", "m=2GiB"])
    assert done.exit_code == 0
    (pod,) = yaml.safe_load(done.stdout)["derived"]["nodes"]
    assert pod["memory"] > 4 * 2**30, "they are held twice as an engine starts"


@pytest.mark.parametrize(
    ("weights", "said"),
    [((), "--weights m=SIZE"), (("m",), "MODEL=SIZE"), (("m=much",), "not a size")],
)
def test_says_how_to_give_them(path: Path, weights: tuple[str, ...], said: str) -> None:
    options = [word for one in weights for word in ("--weights", one)]
    done = CliRunner().invoke(app, ["kube", "values", str(path), *options])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_weights_that_are_here_are_measured(path: Path) -> None:
    folder = path.parent / "models/m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(2**20, np.float32)}, folder / "model.safetensors")
    done = CliRunner().invoke(app, ["kube", "values", str(path)])
    assert done.exit_code == 0, done.exception


def test_the_environment_is_printed_as_the_chart_reads_it() -> None:
    done = CliRunner().invoke(app, ["kube", "env"])
    assert done.stdout == environment_file()
    assert yaml.safe_load(done.stdout) == pod_environment()


def test_a_configuration_with_an_empty_line_stays_itself() -> None:
    text = TEXT + "\n"
    again = yaml.safe_load(values_file(text, {"mode": "node"}))["config"]
    assert parse(again) == parse(text)
