"""The section ``devices``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from loomserve.platform.config.base import Bytes, FieldError, Name, Section

LOCAL_NODE = "local"
"""The one node of a platform that is no cluster."""


class Device(Section):
    """A place where an engine runs: some cores of a machine, or one GPU."""

    name: Name = Field(description="What models refer to.")
    kind: Literal["cpu", "cuda"] = Field("cpu", description="cpu: some cores; cuda: one GPU.")
    cores: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="The cores that an engine on this CPU device is bound to."
    )
    node: Name | None = Field(
        None, description="Of a cluster: the node that it is on, as loomserve node --name says."
    )
    gpu: Annotated[int, Field(ge=0)] | None = Field(
        None, description="The GPU's number on its node, as nvidia-smi counts."
    )

    memory: Bytes | None = Field(
        None,
        description="Memory that all models on it may take together, such as 8GiB: for one that is "
        "asked for others are put away; null: no bound.",
    )
    host_memory: Bytes | None = Field(
        None,
        description="Of a GPU: memory of its host that engines on it may take together, with the "
        "weights of those that sleep. One whose weights would exceed it is unloaded instead, or "
        "another that sleeps; null: no bound.",
    )

    @property
    def on(self) -> str:
        """The name of its node."""
        return self.node or LOCAL_NODE

    @model_validator(mode="after")
    def _kind_has_its_place(self) -> Device:
        wanted, unwanted = ("cores", "gpu") if self.kind == "cpu" else ("gpu", "cores")
        given = {"cores": bool(self.cores), "gpu": self.gpu is not None}
        what = f"device {self.name!r} is of kind {self.kind}"
        if given[unwanted]:
            raise FieldError(f"{what}: give it {wanted}, and no {unwanted}", unwanted)
        if not given[wanted]:
            raise FieldError(f"{what}: give it {wanted}", wanted)
        if self.kind == "cpu" and self.host_memory is not None:
            raise FieldError(f"{what}, whose memory is the host's: set memory alone", "host_memory")
        if len(set(self.cores)) != len(self.cores):
            raise FieldError(f"device {self.name!r} names a core twice", "cores")
        return self
