"""Roles of replicas: prefill, decode, or both.

Every replica can do both; a role only says what is sent to it. So a role may change at any time,
and where the replicas of one role are missing, those of the other do the whole work.
"""

from __future__ import annotations

from enum import StrEnum

from loomserve.platform.config import Model


class Role(StrEnum):
    UNIFIED = "unified"  # computes prompts and generates their answers
    PREFILL = "prefill"  # computes prompts for decode replicas
    DECODE = "decode"  # generates answers to prompts that prefill replicas computed


def configured_role(model: Model, device: str) -> Role:
    """The role that a replica of ``model`` on ``device`` starts with. It follows from the device's
    position in the model's list, so that a replica that restarts on its device has the role of its
    predecessor."""
    if model.roles is None:
        return Role.UNIFIED
    place = model.devices.index(device)
    if place < model.roles.prefill:
        return Role.PREFILL
    if place < model.roles.prefill + model.roles.decode:
        return Role.DECODE
    return Role.UNIFIED
