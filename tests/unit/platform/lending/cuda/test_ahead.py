"""The kernels as a GPU would run them: compiled ahead of time, which needs none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which compiles the kernels, is not installed")

from loomserve.platform.lending.cuda.ahead import compiled
from loomserve.platform.lending.cuda.buffer import TaskShape

pytestmark = pytest.mark.heavy

LLAMA_3_8B = TaskShape(
    layers=32,
    query_heads=32,
    kv_heads=8,
    head_size=128,
    block_size=16,
    dtype=torch.bfloat16,
    scale=128**-0.5,
    max_rows=128,
    max_requests=128,
    max_blocks=512,
)


KERNELS = {
    "describe_rows", "post_rows", "wait_for_answer", "fetch_rows",
    "poll_task", "write_rows", "attend_rows", "serve_tasks",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", [80, 90])
def test_flags_are_released_and_acquired_for_the_whole_system(capability: int) -> None:
    kernels = compiled(LLAMA_3_8B, capability)
    assert kernels.keys() == KERNELS
    text = {name: str(one.asm["ptx"]) for name, one in kernels.items()}
    assert all(f".target sm_{capability}" in ptx for ptx in text.values())
    assert all(one.asm["cubin"] for one in kernels.values())
    for name in ("post_rows", "attend_rows"):
        # Each program's count, and the last one's flag behind it, with a barrier before each.
        count = text[name].index("atom.global.sys.acq_rel.add")
        flag = text[name].index("st.release.sys.global.b64")
        assert count < flag
        assert "bar.sync" in text[name][:count]
        assert "bar.sync" in text[name][count:flag]
    for name in ("wait_for_answer", "poll_task"):
        assert "ld.global.sys.acquire" in text[name]
    # A deadline, and what else can end the wait, is looked at anew each time.
    loop = text["wait_for_answer"]
    assert all(word in loop for word in ("%globaltimer", "nanosleep", "ld.volatile.global"))


def test_no_atomic_crosses_a_link_which_may_know_none() -> None:
    kernels = compiled(LLAMA_3_8B, 90)
    atomics = {
        name: {found.split(".")[-2] for found in re.findall(r"atom\.\S+", one.asm["ptx"])}
        for name, one in kernels.items()
    }
    # What programs of a grid count each other by, in their own GPU's memory.
    assert atomics.pop("post_rows") == {"add"}
    assert all(of <= {"add", "exch"} for of in atomics.values())
    assert not any(atomics[name] for name in ("describe_rows", "wait_for_answer", "fetch_rows"))
    # Those of a lender at whole words are of its state.
    exchanges = re.findall(r"atom\.\S+exch\S*", kernels["attend_rows"].asm["ptx"])
    assert all(".gpu." in each for each in exchanges)


def test_a_steps_rows_are_described_whatever_lies_at_their_addresses() -> None:
    # Parts of a batch begin anywhere: no load may count on more than its type's alignment.
    text = str(compiled(LLAMA_3_8B, 90)["describe_rows"].asm["ptx"])
    loads = re.findall(r"ld\.global\S*", text)
    assert loads
    assert not any("v2" in each or "v4" in each for each in loads)


def test_programs_of_the_server_that_stays_meet_by_release_and_acquire() -> None:
    text = str(compiled(LLAMA_3_8B, 90)["serve_tasks"].asm["ptx"])
    found = [
        text.index(word)
        for word in (
            "ld.global.sys.acquire",  # The first program sees what is posted,
            "ld.global.gpu.acquire",  # and all of them which task it took;
            "atom.global.gpu.release.add",  # each counts itself when its rows are written,
            "atom.global.sys.acq_rel.add",  # and again when its part is computed.
            "st.release.sys.global.b64",  # Who ends last publishes.
        )
    ]
    assert found == sorted(found)
    assert "atom.global.gpu.release.exch" in text[: found[1]]
    # No load may be answered by a cache that other programs' stores do not reach.
    assert "ld.global.nc" not in text


@pytest.mark.parametrize("name", ["attend_rows", "serve_tasks"])
def test_attention_runs_on_matrix_units_and_loads_keys_and_values_16_bytes_at_a_time(
    name: str,
) -> None:
    attend = compiled(LLAMA_3_8B, 90)[name]
    assert re.search(r"mma.*bf16", attend.asm["ptx"])
    assert attend.metadata.shared <= 100 * 1024
    # Into shared memory, while the tile before is computed.
    assert re.search(r"cp\.async\.cg\.shared\.global.* 0x10", attend.asm["ptx"])
    assert "ld.global.b16" not in attend.asm["ptx"]


def test_another_type_and_heads_that_are_no_power_of_two_compile() -> None:
    change = {"dtype": torch.float16, "head_size": 80, "query_heads": 24}
    small = TaskShape(**{**vars(LLAMA_3_8B), **change})
    assert compiled(small, 90).keys() == KERNELS


def test_blocks_that_lie_abreast_are_loaded_as_wide_as_others() -> None:
    def loads(abreast: int) -> list[str]:
        text = str(compiled(LLAMA_3_8B, 90, abreast)["attend_rows"].asm["ptx"])
        return re.findall(r"(?:ld\.global|cp\.async)\S*", text)

    plain, abreast = loads(1), loads(2)
    assert any("v4" in each or "cp.async.cg" in each for each in plain)
    assert sorted(plain) == sorted(abreast)
