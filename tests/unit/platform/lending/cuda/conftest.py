from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which interprets the kernels, is not installed")

from tests.unit.platform.lending.cuda import ends
from tests.unit.platform.lending.cuda.ends import PATIENCE_S
from tests.unit.platform.lending.cuda.loans import SHAPE, Loan, Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        both = Processes()
        started = [both.at_borrower(ends.interpreted), both.at_lender(ends.interpreted)]
        assert [one.result() for one in started] == [True, True]
        yield both
        both.end()


@pytest.fixture
def loan(processes: Processes) -> Loan:
    torch.manual_seed(7)
    return Loan(processes, SHAPE, PATIENCE_S)
