"""A borrower and a lender give memory back while they sleep, and borrow and lend again."""

from __future__ import annotations

import pytest

from tests.integration.lending_pair import Pair, answers, prompts
from tests.integration.test_sleep import own_bytes

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("side", ["hot", "cold"])
def test_memory_of_a_borrower_and_a_lender_goes_back_and_loans_work_afterwards(
    pair: Pair, side: str
) -> None:
    asked = prompts(81, 6, 60)
    engine = getattr(pair, side)
    expected = answers(pair.hot, asked)
    assert answers(engine, asked) == expected
    (pid,) = engine.collective_rpc("process_id")
    used = own_bytes(pid)
    assert engine.reset_prefix_cache()
    engine.collective_rpc("sleep", args=(1,))
    assert own_bytes(pid) < used
    engine.collective_rpc("wake_up")
    assert answers(engine, asked) == expected
    with pair.loan() as stats:
        assert answers(pair.hot, asked) == expected
        assert stats().tasks > 0
