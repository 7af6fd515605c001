"""Write the JSON files of all dashboards beside this one, and the Helm chart's files of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dashboards.table import DASHBOARDS

FOLDER = Path(__file__).parent
ALERTS = FOLDER / "alerts.yaml"
OF_CHART = FOLDER.parent / "k8s/chart/files"


def write(folder: Path) -> None:
    """Write all files, each as ``NAME.json``."""
    for dashboard in DASHBOARDS:
        (folder / f"{dashboard.name}.json").write_text(dashboard.text())


def write_for_chart(folder: Path) -> None:
    """Write ``alerts.yaml`` and ``dashboards/NAME.json`` below ``folder``, and no others there.

    Helm reads no file outside its chart, and not all that fetch charts from a repository follow
    links. A dashboard is one line: all of them share one ConfigMap, which is 1 MiB at most.
    """
    kept = folder / "dashboards"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for dashboard in DASHBOARDS:
        text = json.dumps(dashboard.json(), separators=(",", ":"))
        (kept / f"{dashboard.name}.json").write_text(f"{text}\n")
    shutil.copyfile(ALERTS, folder / ALERTS.name)


if __name__ == "__main__":
    write(FOLDER)
    write_for_chart(OF_CHART)
