from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.index.recovery import ChainRun, chain_runs
from loomserve.kvstore.storage.checksum import BlockHeader

SPACE = b"n" * 16
NOTHING = bytes(16)


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def chain(*names: str) -> bytes:
    return b"".join(map(key, names))


def headers(*names: str) -> list[BlockHeader]:
    keys = [NOTHING, *map(key, names)]
    return [BlockHeader(SPACE, keys[i + 1], keys[i], i) for i in range(len(names))]


def test_a_chain_becomes_one_run() -> None:
    blocks = headers("a", "b", "c")
    found = list(chain_runs({block: i for i, block in enumerate(blocks)}, blocks))
    assert found == [ChainRun(SPACE, chain("a", "b", "c"), 0, [0, 1, 2])]


def test_a_fork_becomes_a_run_for_each_arm_after_their_common_one() -> None:
    one, other = headers("a", "b", "c"), headers("a", "b", "d")
    places = {block: i for i, block in enumerate([*one, other[-1]])}
    found = list(chain_runs(places, places))
    assert found[0] == ChainRun(SPACE, chain("a", "b"), 0, [0, 1])
    assert sorted(found[1:]) == [
        ChainRun(SPACE, chain("a", "b", "c"), 2, [2]),
        ChainRun(SPACE, chain("a", "b", "d"), 2, [3]),
    ]


def test_blocks_behind_a_lost_one_are_left_out() -> None:
    first, _, third = headers("a", "b", "c")
    assert list(chain_runs({first: 1, third: 3}, [first, third])) == [
        ChainRun(SPACE, key("a"), 0, [1])
    ]


def test_a_block_known_from_elsewhere_splits_a_run_and_does_not_end_it() -> None:
    first, second, third = headers("a", "b", "c")
    assert list(chain_runs({first: 1, third: 3}, [first, second, third])) == [
        ChainRun(SPACE, key("a"), 0, [1]),
        ChainRun(SPACE, chain("a", "b", "c"), 2, [3]),
    ]


def test_a_header_with_the_wrong_depth_is_an_orphan() -> None:
    first, second = headers("a", "b")
    wrong = second._replace(depth=5)
    assert list(chain_runs({first: 1, wrong: 2}, [first, wrong])) == [
        ChainRun(SPACE, key("a"), 0, [1])
    ]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=8))
def test_every_block_with_all_its_ancestors_is_found_once(paths: list[list[str]]) -> None:
    # A key implies what came before it, as vLLM's chained hashes do.
    chains = {tuple("".join(path[: i + 1]) for i in range(len(path))) for path in paths}
    places = {block: i for i, block in enumerate({b for c in chains for b in headers(*c)})}
    found: dict[bytes, int] = {}
    for run in chain_runs(places, places):
        for at, place in enumerate(run.places):
            end = (run.first + at + 1) * 16
            assert run.keys[:end] not in found
            found[run.keys[:end]] = place
    assert found == {
        chain(*c[: i + 1]): places[headers(*c)[i]] for c in chains for i in range(len(c))
    }
