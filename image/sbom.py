"""Prints what is installed here in CycloneDX's format: Python's packages and Debian's.

It runs while the image is built, by the image's Python, and needs nothing but that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]

_QUERY = "${db:Status-Abbrev}\t${binary:Package}\t${Version}\t${Architecture}\n"


def bill(components: list[Component]) -> dict[str, Any]:
    """One that is found in two folders of the path, as an editable package is, counts once."""
    by_ref = {component["bom-ref"]: component for component in components}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": "loomserve", "bom-ref": "loomserve"}
        },
        "components": [by_ref[ref] for ref in sorted(by_ref)],
    }


def python_component(distribution: Distribution) -> Component:
    metadata = distribution.metadata
    name = re.sub(r"[-_.]+", "-", metadata["Name"]).lower()
    # torch's builds have a local version, whose + is not a space.
    purl = f"pkg:pypi/{name}@{quote(distribution.version)}"
    component = _component(metadata["Name"], distribution.version, purl)
    if "License-Expression" in metadata:
        component["licenses"] = [{"expression": metadata["License-Expression"]}]
    return component


def debian_components(listed: str, system: str) -> Iterator[Component]:
    """Of dpkg-query's lines; ``system`` is ID of os-release, such as debian."""
    for line in listed.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            name = name.partition(":")[0]
            purl = f"pkg:deb/{system}/{quote(name)}@{quote(version)}?arch={architecture}"
            yield _component(name, version, purl)


def _component(name: str, version: str, purl: str) -> Component:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main() -> None:
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_QUERY}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    components = [python_component(each) for each in distributions()]
    components += debian_components(listed, release["ID"].strip('"'))
    json.dump(bill(components), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
