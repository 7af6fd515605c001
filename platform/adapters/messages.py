"""Messages between processes about adapters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class Adapter(_Message):
    """An adapter of a model, with the weights that it had when it was loaded."""

    name: str = Field(description="What clients ask for.")
    model: str
    id: int = Field(ge=1, description="vLLM's number of it, which no other has had in this run.")
    digest: str = Field(description="Of its files, which are kept under it.")
    source: str
    rank: int

    @property
    def key(self) -> str:
        """Tells its KV from that of other adapters, and of other weights of this name."""
        return f"{self.name}@{self.digest}"


class AdapterReport(_Message):
    """A replica's report on an adapter that it was told to load."""

    id: int
    problem: str = Field("", description="Why it does not have it; empty: it has it.")


class AdapterOrder(_Message):
    """All adapters that a replica has to load."""

    adapters: tuple[Adapter, ...]


class AdapterReports(_Message):
    """A replica's answer to an order."""

    reports: tuple[AdapterReport, ...]


class AdapterRoute(_Message):
    """An adapter, for gateways."""

    adapter: Adapter
    replicas: tuple[str, ...] = Field((), description="Ids of the replicas that have it.")
    leaves: bool = Field(
        False, description="Whether only requests that have begun with it go on with it."
    )
