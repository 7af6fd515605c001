"""A short profile of the real demo engine, by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from loomserve.platform.costs.profile import Profile, load, mape, path_of
from loomserve.platform.costs.step_time import Step
from loomserve.platform.models import catalog

pytestmark = pytest.mark.engine

# As short as it gets: three rounds.
SMALL = {
    "--minutes": "0",
    "--max-model-len": "512",
    "--max-num-batched-tokens": "256",
    "--max-num-seqs": "8",
    "--kv-cache-memory": "96MiB",
}


@pytest.mark.slow
def test_a_profile_predicts_steps_far_better_than_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(catalog.resolve("demo", tmp_path))
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    command = Path(sys.executable).with_name("loomserve")
    options = [word for option in SMALL.items() for word in option]
    done = subprocess.run(
        [command, "profile", model, *options],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "predictions of steps that the profile has not seen" in done.stdout

    [path] = (tmp_path / "profiles").iterdir()
    profile = Profile.model_validate_json(path.read_bytes())
    assert path == path_of(profile.weights, profile.engine)
    steps = profile.timed_steps()
    mean = mape([fmean(seconds for _, seconds in steps)] * len(steps), steps)
    assert profile.mape < mean / 2
    assert profile.noise is not None
    assert {step.requests for step, _ in steps} >= {1, 2}
    assert any(step.tokens > step.requests for step, _ in steps)

    times, transfers = load(profile.weights, profile.engine)
    assert times.prefill_s(256, 256) > times.seconds(Step.of([(0, 1)])) > 0
    assert 1e7 < 2**24 / transfers.out.seconds(2**24) < 1e12
    assert 1e7 < 2**24 / transfers.into.seconds(2**24) < 1e12
