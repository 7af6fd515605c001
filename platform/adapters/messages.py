"""Adapters as processes tell each other of them."""

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
        """By which engines and routers tell its KV from that of others, and of other weights."""
        return f"{self.name}@{self.digest}"


class AdapterReport(_Message):
    """What a replica says of an adapter that it shall have."""

    id: int
    problem: str = Field("", description="Why it does not have it; empty: it has it.")


class AdapterOrder(_Message):
    """All adapters that a replica shall have."""

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
