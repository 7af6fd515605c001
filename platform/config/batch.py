"""The section ``batch``."""

from __future__ import annotations

from pydantic import Field, model_validator

from loomserve.platform.config.base import Bytes, FieldError, ModelName, Name, Revision, Section
from loomserve.platform.config.batching import Batching
from loomserve.platform.config.lengths import Lengths
from loomserve.platform.config.simulated import SIMULATED


class OfflineModel(Section):
    """A model that answers batches only: transformers computes it, in static batches."""

    name: ModelName = Field(description="The name that lines of batches ask for.")
    source: str = Field(min_length=1, description="As in models[]: weights that transformers runs.")
    revision: Revision | None = Field(None, description="As in models[].")
    device: Name = Field(
        description="The CPU device on whose cores it computes while engines leave them idle."
    )
    kv_cache_memory: Bytes = Field(
        512 * 2**20,
        description="Memory for the KV of one batch, such as 512MiB; a batch that outgrows it is "
        "split in two.",
    )
    lengths: Lengths | None = Field(
        None, description="Predict its answers' lengths; null: by lines that have finished."
    )
    batching: Batching = Field(
        default_factory=Batching, description="Which lines run together, and which batch is next."
    )

    @model_validator(mode="after")
    def _has_weights(self) -> OfflineModel:
        if self.source == SIMULATED:
            raise FieldError(
                f"offline model {self.name!r} has nothing to compute with: give it weights, or "
                "have batches ask for a simulated model under models",
                "source",
            )
        return self


class Batch(Section):
    """OpenAI's files and batches, computed while online requests leave room."""

    folder: str | None = Field(
        None,
        description="Where files and answers are kept, relative to this file; null: batch in the "
        "user's cache folder ($LOOMSERVE_HOME).",
    )
    max_file_bytes: Bytes = Field(
        200 * 2**20, description="Larger input files are answered 413, such as 200MiB."
    )
    max_lines: int = Field(50_000, ge=1, description="Requests in one batch.")
    max_bytes_per_key: Bytes = Field(
        10 * 2**30,
        description="Uploads beyond so many bytes of files of one API key, answers among them, are "
        "answered 413, such as 10GiB.",
    )
    max_batches_per_key: int = Field(
        10, ge=1, description="Batches of one API key beyond so many unended ones are answered 429."
    )
    max_unended_lines: int = Field(
        500_000,
        ge=1,
        description="Lines of all unended batches; beyond them new batches are answered 429, and "
        "accepted ones wait.",
    )
    min_free_space: Bytes = Field(
        2**30, description="Uploads that leave less room in the folder are answered 503."
    )
    line_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="Most seconds in which an engine gives a line no token; then it is tried "
        "again, three times in all, or as often as it takes if it had got none at all.",
    )
    concurrency: int = Field(
        256,
        ge=1,
        description="Lines that engines have at once, of all batches and models; each of "
        "offline_models takes as many again into its queue.",
    )
    retention_days: float = Field(
        30.0, gt=0, description="Files and ended batches are removed when they are so old."
    )
    offline_models: tuple[OfflineModel, ...] = Field(
        (),
        description="Offline models, run by transformers: those that vLLM does not serve, "
        "or that need not answer online.",
    )

    @model_validator(mode="after")
    def _one_batch_fits(self) -> Batch:
        if self.max_lines > self.max_unended_lines:
            raise FieldError(
                f"one batch of max_lines ({self.max_lines}) would never begin: raise "
                "max_unended_lines, or lower max_lines",
                "max_unended_lines",
            )
        return self
