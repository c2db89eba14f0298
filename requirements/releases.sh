#!/usr/bin/env bash
# Runs the tests near sampling and of sleep, and a GRPO run, with other releases of vLLM than the one in .venv.
#
#   VENV=/path/to/venv requirements/releases.sh [VERSION...]
#
# `make test-releases` calls it. What a release needs besides .venv is in releases/VERSION.txt, and VERSION.patch mends its
# CPU backend where nothing could run on it. It is unpacked once, without its dependencies, into .cache/releases/VERSION,
# which goes before .venv's packages on PYTHONPATH: 130 MB to download and seconds to unpack; for 0.24 another torch too.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
TORCH_INDEX=https://download.pytorch.org/whl/cpu
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile)
ENGINE=(lossless lossless_logprobs lossless_distribution scheduler drafter_swap serve_drafter sleep)
GRPO="idle_replica or published_version or agree_on_probabilities"

say() { echo "test-releases: $*"; }

# A CPU build of torch where there is one; else the one for GPUs with its libraries (4 GB), which computes on a CPU too.
lay_torch() {
  "${pip[@]}" --no-deps --target "$2" "$1" 2>/dev/null ||
    "${pip[@]}" --no-deps --target "$2" --index-url "$TORCH_INDEX" "$1" 2>/dev/null ||
    "${pip[@]}" --target "$2" "${1%+cpu}"
}

lay() {
  local list=requirements/releases/$1.txt folder=.cache/releases/$1 patch=requirements/releases/$1.patch inputs torch
  [ -f "$list" ] || { say "there is no $list"; return 1; }
  inputs=$(cat requirements/releases/"$1".* | cksum)
  if [ "$(cat "$folder/laid.txt" 2>/dev/null)" = "$inputs" ]; then return; fi
  say "$1: $(grep -c == "$list") packages into $folder"
  rm -rf "$folder" && mkdir -p "$folder"
  if torch=$(grep '^torch==' "$list"); then lay_torch "$torch" "$folder" || return 1; fi
  "${pip[@]}" --no-deps --target "$folder" $(grep -v '^torch==\|^#' "$list") || return 1
  if [ -f "$patch" ]; then GIT_CEILING_DIRECTORIES=$PWD/.cache git -C "$folder" apply "$PWD/$patch" || return 1; fi
  # As vllm-metadata/: verl and vLLM ask for the version of a distribution called vllm.
  mkdir "$folder/vllm-$1+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$1" > "$folder/vllm-$1+cpu.dist-info/METADATA"
  printf '%s\n' "$inputs" > "$folder/laid.txt"
}

# pytest's exit status; the two kinds of tests are two processes, as in `make test`.
try() {
  local engine=("${ENGINE[@]/#/tests/engine/test_}") failed=0
  engine=("${engine[@]/%/.py}")
  export PYTHONPATH=$PWD/.cache/releases/$1:$PWD
  export TLT_UNTESTED=1  # for releases that this script is the first to test
  "$VENV/bin/pytest" -p no:cacheprovider -n 2 --dist loadfile -m "not heavy" "${engine[@]}" || failed=1
  "$VENV/bin/pytest" -p no:cacheprovider tests/e2e/test_grpo.py -k "$GRPO" || failed=1
  if [ "$1" = 0.32.0 ]; then "$VENV/bin/pytest" -p no:cacheprovider tests/engine/test_v2_*.py || failed=1; fi
  return $failed
}

[ $# -gt 0 ] || set -- $(cd requirements/releases && ls ./*.txt | sed 's,^\./,,; s,\.txt$,,')
failed=()
for version in "$@"; do
  if lay "$version" && (try "$version"); then say "vLLM $version passed"; else failed+=("$version"); fi
done
[ ${#failed[@]} = 0 ] || { say "not with vLLM ${failed[*]}"; exit 1; }
