#!/usr/bin/env bash
# install.sh [VENV]: real, unmodified SGLang for a CPU into an environment of its own (.venv-sglang), 2.6 GB.
# Not into the project's: SGLang pins other versions of torch and transformers.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/../../.venv-sglang}
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed: PYTHON=…")'
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# Where an index offers the CPU build, the local version is preferred; else the default build serves too.
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps --requirement "$here/requirements.txt"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
cp -r "$here"/shims/. "$site/"
"$venv/bin/python" -c 'import sglang; print("SGLang", sglang.__version__, "in", __import__("sys").prefix)'
