"""What README.md claims of real engines: the words there of each claim, by the name it has here.

``pytest.mark.claim(name)`` marks a test that holds one. ``make test`` runs these, and no others of
real engines.
"""

from __future__ import annotations

CLAIMS = {
    "adapters": "LoRA adapters, asked for by name as models",
    "continuation": "another replica goes on with the same tokens",
    "embeddings": "`demo:all-minilm-l6-v2` embeds",
    "heads": "lending: requests' attention, heads, layers",
    "kv from memory": "Blocks go to shared memory and SSD, and outlive their engine",
    "kv from SSD": "Blocks go to shared memory and SSD, and outlive their engine",
    "layers": "lending: requests' attention, heads, layers",
    "lending": "stores part of a busy model's KV cache and computes attention over it",
    "offline batch": "offline models, in static batches",
    "openai": "OpenAI API: chat, completions",
    "pipeline": "one model over several devices",
    "prefill and decode": "with prefill and decode on replicas of their own",
    "sleep and wake": "models that sleep and load on demand",
    "swap and fair queue": "fair and deadline queues, preemption by swap or recomputation",
}
