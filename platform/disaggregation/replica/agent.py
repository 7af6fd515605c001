"""What a replica is for, and where its prompts are computed."""

from __future__ import annotations

from loomserve.platform.disaggregation.engine.prefill_decode import PrefillDecodeLLM
from loomserve.platform.disaggregation.replica.prefill_replicas import PrefillReplicas
from loomserve.platform.fleet.messages import DesiredState, EngineSpec
from loomserve.platform.state.roles import Role, configured_role


class RoleAgent:
    """Keeps an engine in its replica's role: a decode engine has prompts computed elsewhere."""

    def __init__(self, llm: PrefillDecodeLLM, spec: EngineSpec, device: str) -> None:
        """
        Args:
            llm: the engine's front end.
            spec: the engine's.
            device: the replica's, by which it has its first role.
        """
        self._llm = llm
        self._replicas = PrefillReplicas(spec.internal_token, spec.model.router.load_limit)
        if spec.model.roles is not None:
            llm.local_prompt_tokens = spec.model.roles.local_prompt_tokens
        self._take(configured_role(spec.model, device))

    def apply(self, desired: DesiredState) -> None:
        self._replicas.set_replicas(desired.peers)
        self._take(desired.role)

    def _take(self, role: Role) -> None:
        self.role = role
        self._llm.remote = self._replicas.prefill if role is Role.DECODE else None

    async def close(self) -> None:
        await self._replicas.close()
