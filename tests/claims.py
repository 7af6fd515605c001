"""What README.md claims of real engines: the words there of each claim, by the name it has here.

``pytest.mark.claim(name)`` marks a test that holds one. ``make test`` runs these, and no others of
real engines.
"""

from __future__ import annotations

CLAIMS = {
    "adapters": "LoRA adapters, asked for by name as models",
    "continuation": "A stream goes on, with the same tokens, when its engine is killed",
    "embeddings": "`demo:all-minilm-l6-v2` embeds",
    "heads": "An operator's moves pause streams for",
    "kv from memory": "blocks of prompts outlive the engine that computed them, in shared memory",
    "kv from SSD": "in shared memory and on\n  SSD",
    "layers": "lending: requests' attention, heads, layers",
    "lending": "a hot model's attention runs on a cold model's device",
    "offline batch": "offline models, in static batches",
    "openai": "OpenAI API: chat, completions",
    "pipeline": "one model over several devices",
    "prefill and decode": "Prefill and decode on replicas of their own",
    "sleep and wake": "models that sleep and load on demand",
    "swap and fair queue": "fair and deadline queues, preemption by swap or recomputation",
}
