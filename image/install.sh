#!/usr/bin/env bash
# Installs Loomserve for DEVICE in /opt/loomserve, while the image is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=/opt/loomserve

PURPOSE=serve VENV=$venv PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 scripts/install.sh
# pip stays, as it fetches demo models; uv and the log are of the installation alone.
"$venv/bin/python" -m pip uninstall --quiet --yes --root-user-action ignore uv
rm "$venv"/install.{log,stamp}
"$venv/bin/python" image/sbom.py >"$venv/sbom.json"
