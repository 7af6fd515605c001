"""docs/models.md has the families that tests serve, and says of each what holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loomserve.platform.config import Model
from loomserve.platform.models import catalog
from tests import tiny_models
from tests.families import FAMILIES, Family

PAGE = Path(__file__).parents[2] / "docs/models.md"


def row(family: Family) -> str:
    stays = "the same text" if family.continued else "another text"
    stays = stays if family.resumed else "an error"
    told = [
        f"`{family.architecture}`",
        f"`{family.endpoint}`",
        "yes" if family.stored else "no",
        "yes" if family.lent else "no",
        stays if family.generates else "asked again",
    ]
    return f"| {' | '.join([family.name, *told])} |"


def test_the_page_has_each_family() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index("|---|---|---|---|---|---|")
    rows = lines[start + 1 : lines.index("", start)]
    assert rows == [row(each) for each in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_what_its_row_says(family: Family, tmp_path: Path) -> None:
    if family.model not in tiny_models.FAMILIES:
        pytest.skip("it is fetched, by the test that serves it")
    folder = tiny_models.write(family.model, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["architectures"] in (
        [family.architecture],
        # vLLM calls it so where it pools.
        [family.architecture.replace("ForCausalLM", "Model")],
    )
    catalog.check_folder(folder)
    lends = {"name": "m", "source": str(folder), "devices": ["core0"], "engine": family.engine}
    assert family.lent == (catalog.has_plain_attention(folder) and _may_lend(lends))


def _may_lend(model: dict[str, object]) -> bool:
    try:
        Model.model_validate({**model, "lending": {"lend_memory": "1MiB"}})
    except ValueError:
        return False
    return True
