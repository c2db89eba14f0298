#!/usr/bin/env bash
# Builds .venv: the CPU environment of the demo and the tests, from released wheels pinned in cpu.lock (4 GB, minutes).
#
#   PYTHON=/path/to/python3.11 VENV=/path/to/venv requirements/setup.sh    # or python3.12
#
# `make setup` calls it once; a finished environment is marked by $VENV/.setup-done, which names what it was built from.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
TORCH=2.13.0
TORCH_INDEX=https://download.pytorch.org/whl/cpu
STAMP=$VENV/.setup-done

fail() { echo "setup: $*" >&2; exit 1; }
say() { echo "setup: $*"; }

inputs=$(cat requirements/{cpu.lock,setup.sh,vllm-metadata/pyproject.toml} verl_cpu/pyproject.toml pyproject.toml | cksum)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$inputs" ]; then
  touch "$STAMP"
  exit 0
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the CPU build of vLLM exists for Linux x86_64 only, and this is $(uname -sm)."
if [ -x "$VENV/bin/python" ]; then PYTHON=$VENV/bin/python; fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null ||
  fail "Python 3.11 or 3.12 is needed and '$PYTHON' is neither; install one or say where it is: make setup PYTHON=/path/to/python3.11"

rm -f "$STAMP"
if [ ! -x "$VENV/bin/python" ]; then
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "'$PYTHON' cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)."
  say "making $VENV"
  "$PYTHON" -m venv "$VENV"
fi
pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --no-deps)

# pip's own output is thousands of lines: every 25th package and whatever went wrong is enough to see it move.
watched() {
  "$@" 2>&1 | awk '/^Collecting/ && ++n % 25 == 0 { print "setup:   " n " packages found"; fflush() }
    /^Installing collected/ { print "setup:   unpacking"; fflush() }
    /^ERROR|^error|[Nn]o space left/ { print; fflush() }'
}

# torch first and alone: asking PyTorch's index for every other package too would cost seconds each where it is slow.
# Where no CPU build is to be had, PyPI's does, which is for GPUs, brings their libraries and computes on a CPU too.
lay_torch() {
  "${pip[@]}" --quiet "torch==$TORCH+cpu" 2>/dev/null && return
  watched "${pip[@]}" --index-url "$TORCH_INDEX" "torch==$TORCH+cpu" && return
  say "no CPU build of torch $TORCH found. Installing PyPI's build with the CUDA libraries instead (5 GB)"
  watched "$VENV/bin/python" -m pip --disable-pip-version-check install "torch==$TORCH"
}
if ! "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH')" 2>/dev/null; then
  say "installing torch $TORCH"
  lay_torch || fail "torch $TORCH could not be installed; put its wheel where pip finds it (PIP_FIND_LINKS)."
fi
say "installing $(grep -c == requirements/cpu.lock) pinned packages"
watched "${pip[@]}" --requirement requirements/cpu.lock || fail "a package of requirements/cpu.lock could not be installed; pip says which above."
say "installing verl-tlt and its CPU platform"
watched "${pip[@]}" --no-build-isolation ./requirements/vllm-metadata --editable . --editable ./verl_cpu
# torch's and vLLM's platform choice, and the plugin that verl loads, are what goes wrong first: see it now.
"$VENV/bin/python" - <<'PY' || fail "the new environment is broken. Remove $VENV, then run make setup again."
import importlib.metadata as metadata
assert metadata.version("vllm").endswith("+cpu") and metadata.version("verl") == "0.9.1"
import verl_cpu.environment, verl.utils.config
assert verl.utils.config.validate_config._verl_tlt, "verl did not load the plugin of verl-tlt"
PY
printf '%s\n' "$inputs" > "$STAMP"
say "done: $VENV"
