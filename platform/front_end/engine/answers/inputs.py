"""Inputs that vLLM takes and that say nothing to a model: unknown roles, unknown tokens.

vLLM makes the objects; :func:`check_inputs` changes their classes to those here.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from loomserve.platform.requests.policy.conversation import ROLES


class _Renderer(OnlineRenderer):  # type: ignore[misc]
    """Renders conversations with OpenAI's roles, and those that the model's template names."""

    async def preprocess_chat(
        self, request: Any, messages: Any, default_template: Any, *args: Any, **kwargs: Any
    ) -> Any:
        template = self._written(default_template)
        if getattr(request, "documents", None) and template and "documents" not in template:
            raise VLLMValidationError(
                "The model's chat template takes no documents: write them into a message.",
                parameter="documents",
            )
        for number, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else "user"
            if role not in ROLES and template and not _names(template, role):
                raise VLLMValidationError(
                    f"The role {role!r} is none that the model's template names. Those of all "
                    f"models are {', '.join(sorted(ROLES))}.",
                    parameter="input" if hasattr(request, "input") else f"messages[{number}].role",
                )
        return await super().preprocess_chat(request, messages, default_template, *args, **kwargs)

    def _written(self, template: str | None) -> str:
        """The chat template's text; empty: there is none that can be read."""
        return str(template or getattr(self.renderer.get_tokenizer(), "chat_template", "") or "")


def _names(template: str, role: Any) -> bool:
    return any(f"{mark}{role}{mark}" in template for mark in "'\"")


class _Rendering(ServingRender):  # type: ignore[misc]
    """Renders prompts of a vocabulary's tokens alone: no engine gets them, which would refuse
    others in the same words."""

    async def render_completion_request(self, request: Any, *args: Any) -> Any:
        rendered = await super().render_completion_request(request, *args)
        tokenizer = self.online_renderer.renderer.tokenizer
        most = max(getattr(tokenizer, "max_token_id", 0), self.model_config.get_vocab_size() - 1)
        for each in rendered if isinstance(rendered, list) else ():
            # vLLM itself refuses negative ones.
            if (token := max(each.token_ids)) > most:
                raise VLLMValidationError(
                    f"Token id {token} is out of vocabulary", parameter="prompt"
                )
        return rendered


class _Tokenization(ServingTokenization):  # type: ignore[misc]
    """Makes texts of a vocabulary's tokens alone, of which others would be left out."""

    async def create_detokenize(self, request: Any, raw_request: Any) -> Any:
        most = self.model_config.get_vocab_size()
        for number, token in enumerate(request.tokens):
            if not 0 <= token < most:
                raise VLLMValidationError(
                    f"tokens[{number}] is {token}, and the vocabulary has 0 to {most - 1}.",
                    parameter=f"tokens[{number}]",
                )
        return await super().create_detokenize(request, raw_request)


def check_inputs(state: Any) -> None:
    """Have the objects of vLLM's app, in its ``state``, check what they are given."""
    classes = {
        "online_renderer": _Renderer,
        "serving_render": _Rendering,
        "serving_tokenization": _Tokenization,
    }
    for name, made in classes.items():
        if (found := getattr(state, name, None)) is not None:
            found.__class__ = made
