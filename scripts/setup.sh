# Sourced by quickstart.sh and test.sh: a virtual environment with pinned requirements, and the quickstart's target.
# Uses .venv in the repository; does nothing the second time, until pyproject.toml or requirements.txt change.

setup() { # $1: extras of the package, for example "dev"
  local python=${PYTHON:-python3} stamp
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "draftsmith needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    return 2
  }
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  stamp="$1 $(cat pyproject.toml requirements.txt | sha256sum)"
  if [ "$(cat ".venv/stamp-$1" 2>/dev/null)" != "$stamp" ]; then
    echo "installing requirements into .venv (once)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.txt -e ".[$1]"
    echo "$stamp" >".venv/stamp-$1"
  fi
  .venv/bin/python -m draftsmith.scripts.smollm2 .cache/smollm2
}
