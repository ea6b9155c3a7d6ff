#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build with CUDA, all tests on the GPU, compute-sanitizer's four tools,
# graph capture and replay, two streams, the benchmark table.
#
#   bench/gpu_suite.sh [--dry-run] [--quick] [--python PYTHON] [--results FOLDER] [STEP...]
#
# Steps, in this order: build tests sanitizers graphs bench (default: all). --dry-run prints each command, runs what
# needs no GPU (collecting the tests, the benchmark's plan, finding the tools) and says what is missing. Exit status:
# 0 when all that ran passed, 1 when a step failed or there is no GPU, 2 for bad arguments, 3 when --dry-run found
# something missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

dry=0 quick=0 python=${PYTHON:-python3} results=bench/results/gpu steps=()
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --quick) quick=1 ;;
    --python) python=${2:?--python needs an interpreter}; shift ;;
    --results) results=${2:?--results needs a folder}; shift ;;
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0"; exit 0 ;;
    build | tests | sanitizers | graphs | bench) steps+=("$1") ;;
    *) echo "gpu_suite: unknown argument '$1'; steps: build tests sanitizers graphs bench" >&2; exit 2 ;;
  esac
  shift
done
((${#steps[@]})) || steps=(build tests sanitizers graphs bench)

failed=() missing=() optional=()
say() { printf '\n== %s\n' "$*"; }

# run NAME COMMAND...: prints the command; runs it, with its output kept in the results folder, unless this is a dry run.
run() {
  local name=$1 status=0
  shift
  printf '+ %s\n' "$(printf '%q ' "$@")"
  ((dry)) && return 0
  "$@" 2>&1 | tee "$results/$name.log" || status=$?
  if ((status)); then
    failed+=("$name")
    echo "gpu_suite: $name FAILED with status $status (log: $results/$name.log)" >&2
  fi
}

# check WHAT COMMAND...: in a dry run, runs the command and notes WHAT as missing when it fails; "(optional)" in WHAT
# makes that no fault.
check() {
  local what=$1
  shift
  ((dry)) || return 0
  if "$@" >/dev/null 2>&1; then echo "  found: $what"; else
    echo "  MISSING: $what"
    if [[ $what == *"(optional)"* ]]; then optional+=("$what"); else missing+=("$what"); fi
  fi
}

cuda_homes() { printf '%s\n' "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; }
find_nvcc() {
  local home
  while read -r home; do
    if [[ -n $home && -x $home/bin/nvcc ]]; then return 0; fi
  done < <(cuda_homes)
  command -v nvcc
}
find_sanitizer() {
  local home
  while read -r home; do
    if [[ -n $home && -x $home/bin/compute-sanitizer ]]; then echo "$home/bin/compute-sanitizer"; return; fi
  done < <(cuda_homes)
  command -v compute-sanitizer || echo compute-sanitizer
}

wants() { [[ " ${steps[*]} " == *" $1 "* ]]; }

((dry)) || mkdir -p "$results"
check "an NVIDIA GPU (nvidia-smi -L)" nvidia-smi -L
torch_sees_gpu=("$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())')
check "torch on a GPU" "${torch_sees_gpu[@]}"
if ! ((dry)) && ! "${torch_sees_gpu[@]}"; then
  echo "gpu_suite: $python's torch sees no GPU: nothing can be tested here (--dry-run checks the rest)" >&2
  exit 1
fi

if wants build; then
  say "build with CUDA kernels"
  check "nvcc" find_nvcc
  run build env SPECEYES_BUILD=cuda "$python" -m pip install -v --no-build-isolation --no-deps -e .
  run collect-env "$python" -m speceyes_kernels.collect_env
fi

pytest=("$python" -m pytest -p no:cacheprovider --timeout=1800)
if wants tests; then
  say "all tests, the GPU's included"
  ((dry)) && check "the GPU tests can be collected" "${pytest[@]}" --collect-only -q -m gpu tests
  run tests-gpu "${pytest[@]}" -m gpu tests
  ((quick)) || run tests-rest "${pytest[@]}" -m "not gpu and not slow" tests
fi

if wants sanitizers; then
  say "compute-sanitizer: memcheck, racecheck, initcheck, synccheck"
  sanitizer=$(find_sanitizer)
  check "compute-sanitizer" "$sanitizer" --version
  small="every_edge_in_every_layout and bfloat16 or streaming_is_bit_equal or shards_merge or contents_out_of_range"
  small+=" or (answers and 60) or no_rows or device_drafts_equal"
  for tool in memcheck racecheck initcheck synccheck; do
    options=(--tool "$tool" --error-exitcode 86)
    [[ $tool == memcheck ]] && options+=(--leak-check no --padding 32)
    # Without torch's caching allocator each tensor is an allocation of its own: overruns and reads of unwritten bytes
    # can't hide in a neighbour.
    run "sanitizer-$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" "${options[@]}" \
      "${pytest[@]}" -x -m gpu -k "$small" tests/test_separability_gpu.py tests/test_draft_lookup.py
  done
fi

if wants graphs; then
  say "graph capture and replay, two streams, no synchronisation"
  run graphs "${pytest[@]}" -v -m gpu -k "capture_and_replay or two_streams or no_synchronisation or two_launches" \
    tests/test_separability_gpu.py
fi

if wants bench; then
  say "benchmark table"
  options=(--json "$results/bench_gpu.json")
  ((quick)) && options+=(--quick)
  ((dry)) && check "the benchmark's plan" "$python" bench/bench_gpu.py --plan
  ((dry)) && check "FlashInfer, a rival (optional)" "$python" -c 'import flashinfer'
  run bench "$python" bench/bench_gpu.py "${options[@]}"
  run bench-lookup "$python" bench/bench_lookup.py --json "$results/bench_lookup.json"
fi

say "result"
if ((dry)); then
  ((${#optional[@]})) && printf 'not here, and not needed: %s\n' "${optional[@]}"
  if ((${#missing[@]})); then
    printf 'not here: %s\n' "${missing[@]}"
    exit 3
  fi
  echo "nothing is missing"
elif ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
else
  echo "all steps passed: ${steps[*]}"
fi
