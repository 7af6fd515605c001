"""Profile of a model on a device: a file of measurements, and the predictors fitted to them.

It holds the samples, from which loading learns as an engine does that runs.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.base.files import replace_file
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.costs.step_time import OnlineModel, Step, StepTimes, TimedStep
from loomserve.platform.costs.transfer_time import TransferTimes

_logger = logging.getLogger(__name__)


class ProfileError(LoomserveError):
    """There is no profile of this model, device and engine; the message says why."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfileKey(_Node):
    """Device and settings of an engine, on which times depend besides the model's weights."""

    device: str = Field(description="The processor's or GPU's model.")
    threads: int = Field(description="Cores that compute; 0 on a GPU.")
    dtype: str
    block_size: int
    enforce_eager: bool
    vllm: str = Field(description="Version.")


class Transfer(_Node):
    """Transfers in one direction between an engine's KV cache and the host's memory."""

    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    mape: float = Field(description="Error on transfers that were not fitted, as a share.")
    noise: float | None = Field(description="The machine's own, of equal sizes; None: none were.")


class Profile(_Node):
    """Measurements of a model on a device. Errors are shares of the measured time."""

    # Files that are there have fields more, which nothing needs.
    model_config = ConfigDict(extra="ignore")

    model: str
    weights: str = Field(description="Digest of the model's weights, configuration and code.")
    engine: ProfileKey
    measured_at: str = Field(description="UTC, ISO 8601.")
    samples: tuple[tuple[int, int, int, float, float], ...] = Field(
        min_length=1,
        description="Steps in the order of time: tokens, requests, context, attention, seconds.",
    )
    mape: float = Field(description="Of a predictor of these steps that saw all but a fifth.")
    noise: float | None = Field(description="The machine's own, of equal steps; None: none were.")
    swap_out: Transfer
    swap_in: Transfer

    def timed_steps(self) -> list[TimedStep]:
        return [
            (Step(tokens, requests, context, attention), seconds)
            for tokens, requests, context, attention, seconds in self.samples
        ]

    def step_times(self) -> StepTimes:
        return StepTimes(OnlineModel.of(self.timed_steps()))

    def transfer_times(self) -> TransferTimes:
        out, into = self.swap_out, self.swap_in
        return TransferTimes(out.bytes_per_s, into.bytes_per_s, out.latency_s, into.latency_s)


def mape(predicted: Iterable[float], samples: Iterable[TimedStep]) -> float:
    """Mean absolute error of predicted seconds, as a share of those measured."""
    pairs = zip(predicted, samples, strict=True)
    return fmean(abs(guess - seconds) / seconds for guess, (_, seconds) in pairs)


def noise(samples: Iterable[tuple[Hashable, float]]) -> float | None:
    """Noise of the machine: :func:`mape` of equal steps, or sizes, against their own median. It
    counts work that was measured three times or more; None if none was. No predictor that does not
    know the machine's state can be much better."""
    same: dict[Hashable, list[float]] = {}
    for work, seconds in samples:
        same.setdefault(work, []).append(seconds)
    repeated = [times for times in same.values() if len(times) >= 3]
    offs = [abs(median(times) - each) / each for times in repeated for each in times]
    return fmean(offs) if offs else None


def held_out(samples: Sequence[TimedStep]) -> tuple[list[TimedStep], list[TimedStep]]:
    """Split the samples: those of a fifth of the distinct steps come second. All samples of a step
    are on the same side, or the error would be that of known steps."""
    steps = sorted({step for step, _ in samples}, key=hash)
    chosen = set(random.Random(0).sample(steps, max(1, round(len(steps) / 5))))
    return (
        [sample for sample in samples if sample[0] not in chosen],
        [sample for sample in samples if sample[0] in chosen],
    )


def path_of(weights: str, engine: ProfileKey) -> Path:
    """Path of a model's profile on a device, in ``profiles`` in the user's cache folder."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", f"{engine.device}-{engine.threads}").strip("-")
    digest = hashlib.sha256(weights.encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{digest}-{device}.json"


def save(profile: Profile) -> Path:
    """Write the profile over an older one of the same model and device."""
    path = path_of(profile.weights, profile.engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, profile.model_dump_json())
    return path


def read(path: Path, weights: str, engine: ProfileKey) -> Profile:
    """Read the profile of this model, machine and engine. Raises ProfileError if it does not exist,
    is damaged, or is of another."""
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{path} is not a profile ({where}: {first['msg']})") from None
    if profile.weights != weights:
        raise ProfileError(f"profile {path} is of other weights ({profile.model})")
    for fact, measured in profile.engine:
        here = getattr(engine, fact)
        if measured != here:
            raise ProfileError(
                f"profile {path} was measured with {fact} {measured}, and here it is {here}"
            )
    return profile


def load(weights: str, engine: ProfileKey) -> tuple[StepTimes, TransferTimes]:
    """Predictors of this engine: from its profile if there is one, else predictors that learn."""
    path = path_of(weights, engine)
    try:
        profile = read(path, weights, engine)
    except ProfileError as error:
        # Most engines were never profiled, and learn quickly.
        level = logging.WARNING if path.exists() else logging.INFO
        _logger.log(level, "%s: costs are learnt as the engine runs (loomserve profile)", error)
        return StepTimes.unprofiled(), TransferTimes.unprofiled()
    return profile.step_times(), profile.transfer_times()
