from __future__ import annotations

from pathlib import Path

from loomserve.platform.engine.core.addresses import DEAD
from loomserve.platform.engine.core.engine_clients import NOBODY, EngineClients, Heard
from loomserve.platform.run.engine_address import EngineAddress


def test_an_index_is_given_once_and_leads_back_to_its_client() -> None:
    known = EngineClients(silence_s=5)
    assert known.hello(b"a", b"", 0) == Heard(first=True)
    assert known.hello(b"b", b"", 0) == Heard(first=True)
    first, second = known.index_of(b"a"), known.index_of(b"b")
    assert first is not None
    assert second is not None
    assert len({first, second, NOBODY}) == 3
    assert known.identity_of(second) == b"b"
    assert known.hello(b"a", b"", 1) == Heard(first=False)
    assert known.index_of(b"a") == first

    assert known.retire(b"a") == first
    assert known.retire(b"a") is None
    assert known.identity_of(first) is None
    assert known.index_of(b"a") is None
    assert known.hello(b"a", b"", 2) == Heard(first=True)
    assert known.index_of(b"a") not in (first, second)
    assert set(known) == {b"a", b"b"}


def test_who_comes_back_on_other_sockets_begins_anew() -> None:
    known = EngineClients(silence_s=5)
    known.hello(b"a", b"1", 0)
    index = known.index_of(b"a")
    assert known.hello(b"a", b"1", 1) == Heard(first=False)
    assert known.hello(b"a", b"2", 1) == Heard(first=True, replaced=index)
    assert known.index_of(b"a") not in (index, None)
    assert len(known) == 1


def test_silence_is_told_after_its_time_and_not_while_nobody_listened() -> None:
    known = EngineClients(silence_s=5)
    known.hello(b"a", b"", 0)
    known.hello(b"b", b"", 3)
    assert known.silent(5) == []
    assert known.silent(6) == [b"a"]
    known.excuse(9)
    assert known.silent(14) == []
    known.hello(b"b", b"", 14)
    assert known.silent(15) == [b"a"]


def test_who_is_quiet_is_probed_once_a_period() -> None:
    known = EngineClients(silence_s=60)
    known.hello(b"a", b"", 0)
    known.hello(b"b", b"", 3)
    assert known.probe(5, 5) == []
    assert known.probe(6, 5) == [b"a"]
    assert known.probe(9, 5) == [b"b"]
    assert known.probe(11, 5) == []
    known.hello(b"a", b"", 11)
    assert known.probe(15, 5) == [b"b"]
    assert known.probe(17, 5) == [b"a"]


def test_what_concerns_no_client_goes_to_the_one_that_is_there_longest() -> None:
    known = EngineClients(silence_s=5)
    assert known.identity_of(NOBODY) is None
    known.hello(b"a", b"", 0)
    known.hello(b"b", b"", 0)
    assert known.identity_of(NOBODY) == b"a"
    known.retire(b"a")
    assert known.identity_of(NOBODY) == b"b"


def test_addresses_in_a_folder_differ_and_are_removed(tmp_path: Path) -> None:
    one, other = EngineAddress.in_folder(tmp_path), EngineAddress.in_folder(tmp_path)
    assert len({one.input, one.output, other.input, other.output}) == 4
    path = Path(one.input.removeprefix("ipc://"))
    assert path.parent == tmp_path
    path.touch()
    one.remove()
    assert not path.exists()


def test_the_word_of_an_engines_end_is_vllms() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    assert DEAD == EngineCoreProc.ENGINE_CORE_DEAD
