from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.state.load_report import LoadBook, LoadReport, read_load_report


def test_a_frame_says_what_was_put_into_it() -> None:
    load = LoadReport(2**40, 3, running=64, waiting=1000, kv_usage=0.25, waiting_tokens=2**33)
    assert read_load_report(load.frame()) == load
    assert read_load_report(memoryview(load.frame())) == load


def test_no_frame_of_vllms_is_taken_for_a_load() -> None:
    for count in (0, 1, 3):
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("LOAD", [1, 2])] * count)
        for frame in MsgpackEncoder().encode(outputs):
            assert read_load_report(frame) is None
    assert read_load_report(b"LOAD") is None


def test_a_load_counts_the_receivers_requests_as_of_its_step() -> None:
    book = LoadBook()
    book.took(1)
    book.took(1)
    book.took(2)
    book.measured(steps=7, running=3, waiting=0, kv_usage=0.5)
    # It came after the step, and is in the next load.
    book.took(2)
    assert read_load_report(book.frame(1)) == LoadReport(7, 2, 3, 0, 0.5)
    assert read_load_report(book.frame(2)) == LoadReport(7, 1, 3, 0, 0.5)
    assert read_load_report(book.frame(3)) == LoadReport(7, 0, 3, 0, 0.5)
    book.measured(steps=8, running=4, waiting=1, kv_usage=0.5, waiting_tokens=70)
    assert read_load_report(book.frame(2)) == LoadReport(8, 2, 4, 1, 0.5, 70)


def test_a_request_that_is_refused_is_not_awaited() -> None:
    book = LoadBook()
    book.refused(1)
    book.took(1)
    book.measured(steps=1, running=1, waiting=0, kv_usage=0.0)
    assert read_load_report(book.frame(1)) == LoadReport(1, 2, 1, 0, 0.0)


def test_who_is_gone_is_not_counted_on() -> None:
    book = LoadBook()
    book.took(1)
    version = book.version
    book.gone(1)
    book.measured(steps=2, running=0, waiting=0, kv_usage=0.0)
    assert read_load_report(book.frame(1)) == LoadReport(2, 0, 0, 0, 0.0)
    assert book.version != version
