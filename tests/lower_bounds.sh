#!/usr/bin/env bash
# Runs the fast tests at the lower bounds of pyproject.toml on Python 3.12:  tests/lower_bounds.sh FOLDER [ARGUMENT ...]
#
# FOLDER: a virtual environment for them, made if it does not exist and used again else; about 6 GB.
# ARGUMENT: arguments of pytest; by default -m "not slow". PYTHON names another interpreter than python3.12.
# A package's bound X is installed as the newest X.*: a patch release is what a bound's users have.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,6p' "$0" | cut -c3- >&2; exit 2; }
venv=$(mkdir -p "$(dirname "$1")" && cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
cd "$(dirname "$0")/.."

[ -x "$venv/bin/python" ] || "${PYTHON:-python3.12}" -m venv "$venv"
bounds=$("$venv/bin/python" - <<'PYTHON'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
    if bound := re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)(?:,.*)?", requirement):
        print(f"{bound[1]}=={bound[2]}.*")
PYTHON
)
if [ "$(cat "$venv/lower_bounds.txt" 2>/dev/null)" != "$bounds" ]; then
    echo "$bounds" > "$venv/wanted.txt"
    "$venv/bin/python" -m pip install --quiet --constraint "$venv/wanted.txt" \
        --editable . pytest pytest-timeout pytest-xdist hypothesis
    mv "$venv/wanted.txt" "$venv/lower_bounds.txt"
fi
[ $# -gt 0 ] || set -- -m "not slow"
exec "$venv/bin/python" -m pytest "$@"
