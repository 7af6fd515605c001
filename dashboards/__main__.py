"""Write the JSON files of all dashboards beside this one."""

from __future__ import annotations

from pathlib import Path

from dashboards.table import DASHBOARDS

FOLDER = Path(__file__).parent


def write(folder: Path) -> None:
    """Write all files, each as ``NAME.json``."""
    for dashboard in DASHBOARDS:
        (folder / f"{dashboard.name}.json").write_text(dashboard.text())


if __name__ == "__main__":
    write(FOLDER)
