#!/usr/bin/env bash
# What has to be measured on a GPU, in order of value. Each part runs on its own, so that one that fails or takes too
# long loses nothing of the others, and what a part has measured by then is kept.
#
#   benchmarks/gpu.sh [--device cuda] [--quick] [--seconds 560] [--out gpu-results] [PART …]
#                     [--data DATA] [--work FOLDER] [--study STUDY] [--cells CONTENDER@POINT,…] [--jobs 4] [--mps]
#
#   tests   the device-dependent tests: every family in bfloat16, compiled, recomputed, sharded; detectors, segmenters;
#           the residual stream, in every design of it; compress; each task trained; resuming to the bit
#   speed   Steps models against their baselines at batch 1 and 256, each at its best setting; of Fig. 6b four pairs
#   memory  Fig. 6c and 6d: throughput, latency and memory of Table 5b's models
#   deep    a study, or the cells of it that are named: by default evidence/cifar10-paper-widths, Table 5a's networks of 24
#           and 96 blocks. DATA is what it is of, as cifar10:PATH, folder:PATH or text:PATH (with --quick one short pair on
#           the digits, and no DATA). Runs that results/ has are not run again. With --work FOLDER runs are kept there, and
#           a later call goes on with them; elsewhere what has not ended is lost, so let --jobs be few for long runs, and as
#           many as there are cores for short ones. Processes use a GPU by turns; with --mps, which starts NVIDIA's MPS
#           and ends it, at the same time, as small models need it. The cores that are left load data
#
# All parts share --seconds, and what is stopped then has 20 more to keep what it has; without names they are tests,
# memory and speed, and with --quick all four. Where a call may not last longer than ten minutes, call it once with
# --quick to see that all parts start, and then for one or two parts at a time.
#
# The output folder has at most seven small files: parts.jsonl with how each part ended, log.txt with the end of what
# each has said, and speed.json, memory.json, memory.csv, deep.tgz (a JSON a run, for `stepsnet sweep --results`) and
# pair.json. They are written as soon as there is something in them.
#
# It needs torch 2.11 or later, torchvision and timm, of this project's requirements those of the extras "detection" and
# "language", pytest and hypothesis; pytest-xdist and pytest-timeout help. The project itself need not be installed.
# STEPSNET_COMMIT names the commit of a copy of the tree. --device cpu --quick is a rehearsal on any machine.
set -uo pipefail
cd "$(dirname "$0")/.."
usage="expected --device DEVICE, --quick, --seconds N, --out FOLDER, --data DATA, --work FOLDER, --study STUDY, --cells CELLS, \
--jobs N, --mps, or some of tests, speed, memory, deep"
device=cuda quick="" out=gpu-results data="" work="" seconds=560 parts=()
study=evidence/cifar10-paper-widths cells="" jobs=4 mps=""
while [ $# -gt 0 ]; do
    case "$1" in
        --device | --out | --data | --seconds | --work | --study | --cells | --jobs)
            [ $# -gt 1 ] && [ -n "$2" ] || { echo "gpu.sh: $1 needs a value; $usage" >&2; exit 2; }
            case "$1" in
                --device) device=$2 ;; --out) out=$2 ;; --data) data=$2 ;; --seconds) seconds=$2 ;; --work) work=$2 ;;
                --study) study=$2 ;; --cells) cells=$2 ;; --jobs) jobs=$2 ;;
            esac
            shift
            ;;
        --quick) quick=--quick ;;
        --mps) mps=1 ;;
        tests | speed | memory | deep) parts+=("$1") ;;
        *) echo "gpu.sh: got $1, $usage" >&2; exit 2 ;;
    esac
    shift
done
for number in "seconds $seconds" "jobs $jobs"; do
    case "${number#* }" in
        0* | *[!0-9]*) echo "gpu.sh: --${number%% *}: got ${number#* }, expected a positive whole number" >&2; exit 2 ;;
    esac
done
deadline=$((SECONDS + seconds)) # of all parts together
[ ${#parts[@]} -gt 0 ] || parts=(tests memory speed ${quick:+deep})
case "$data" in "" | *:*) ;; *) data=folder:$data ;; esac
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export STEPSNET_TEST_DEVICE=$device CUBLAS_WORKSPACE_CONFIG=:4096:8 # read when CUDA starts; resuming to the bit needs it
temporary=()
at_end() {
    [ "$mps" != started ] || echo quit | timeout 20 nvidia-cuda-mps-control
    [ ${#temporary[@]} = 0 ] || rm -rf "${temporary[@]}"
}
trap at_end EXIT
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
modules="torch torchvision timm transformers tokenizers safetensors pydantic yaml rich filelock scipy sklearn matplotlib"
modules+=" jinja2 torchmetrics pycocotools PIL wrapt pytest hypothesis"
look='import sys; from importlib.util import find_spec; print(*[name for name in sys.argv[1:] if find_spec(name) is None])'
if missing=$("$python" -c "$look" $modules) && [ -n "$missing" ]; then
    echo "gpu.sh: $python cannot import $missing, expected the extras detection and language, pytest and hypothesis" >&2
    exit 2
fi
[ -n "$work" ] || { work=$(mktemp -d) && temporary=("$work"); } || exit 2
mkdir -p "$work" || exit 2
if [ -n "$mps" ]; then
    command -v nvidia-cuda-mps-control >/dev/null || { echo "gpu.sh: --mps: no nvidia-cuda-mps-control is installed" >&2; exit 2; }
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) || exit 2 # of its own, so that only these runs share it
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    temporary+=("$CUDA_MPS_PIPE_DIRECTORY")
    nvidia-cuda-mps-control -d || { echo "gpu.sh: --mps: nvidia-cuda-mps-control did not start" >&2; exit 2; }
    mps=started
fi
if ! said=$(timeout 60 "$python" -c "import sys, torch; torch.zeros(1, device=sys.argv[1])" "$device" 2>&1); then
    echo "gpu.sh: torch cannot use the device $device (${said##*$'\n'}), expected another --device" >&2
    exit 2
fi
failed=0

# part NAME SECONDS COMMAND…: run with a limit, and record how it ended and the end of its log
part() {
    local name=$1 limit=$2 started=$SECONDS status=0 left=$((deadline - SECONDS))
    shift 2
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name, at most $limit s: $*"
    if [ "$limit" -gt 0 ]; then
        timeout --kill-after=20 "$limit" "$@" >"$work/$name.log" 2>&1 || status=$?
    else
        echo "no time was left" >"$work/$name.log"
        status=124
    fi
    tail -n 3 "$work/$name.log" | cut -c1-300
    { echo "== $name: status $status"; tail -n 4000 "$work/$name.log" | cut -c1-2000; } >>"$out/log.txt"
    printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - started)) | tee -a "$out/parts.jsonl"
    [ "$status" = 0 ] || failed=1
}

# keep NAME FILE: a result, where there is one
keep() {
    [ ! -f "$2" ] || cp "$2" "$out/$1"
}

tests() {
    local options=(-vv --tb=short -p no:cacheprovider --durations=10) workers=5
    if [ -z "$quick" ] || [ "$device" != cpu ]; then
        ! "$python" -c "import xdist" 2>/dev/null || options+=(-n $workers --maxschedchunk=1)
        ! "$python" -c "import pytest_timeout" 2>/dev/null || options+=(--timeout=90)
    fi
    part tests 300 env OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=3 \
        "$python" -m pytest "${options[@]}" tests/test_on_device.py
}

speed() {
    local left=$((deadline - SECONDS - 30)) # to end the measurement that has begun
    [ -z "$quick" ] || left=30
    part speed $((left + 30)) \
        "$python" benchmarks/device_speed.py --device "$device" $quick --seconds $left --out "$out/speed.json"
}

memory() {
    local models=(table:5b) options=(--amp-dtype bfloat16 --batch-size 64 --rounds 5)
    [ -z "$quick" ] || { models=(test_steps_deit test_vit); options=(--memory 2,4 --batch-size 2 --rounds 2); }
    part memory 200 "$python" -m stepsnet bench "${models[@]}" "${options[@]}" --device "$device" --force --out "$work/memory"
    keep memory.json "$work/memory/speed.json"
    keep memory.csv "$work/memory/speed.csv"
}

deep() {
    if [ -n "$quick" ]; then
        part deep 110 "$python" -m stepsnet compare digits/tiny epochs=1 --seeds 0 --jobs 2 --auto-resume --run "$work/pair" "device=$device"
        keep pair.json "$work/pair/comparison.json"
        return
    elif [ -z "$data" ]; then
        part deep 5 sh -c "echo 'deep needs --data with what $study is of, such as cifar10:PATH'; exit 2"
        return
    fi
    # beside each run's own process; rounded up, since that one waits for the GPU
    local name=${study//\//-} workers=$((($(nproc) + jobs - 1) / jobs - 1))
    [ "$workers" -ge 1 ] || workers=1
    local settings=("device=$device" "workers=$workers")
    [ "$study" != evidence/cifar10-paper-widths ] || settings+=(eval_batch_size=1000)
    [ "$device" = cpu ] || settings+=(cuda_graph=true)
    mkdir -p "$work/results"
    # what there is need not be run again
    [ -d "$work/results/$name" ] || [ ! -d "results/$name" ] || cp -r "results/$name" "$work/results/$name"
    part deep "$seconds" env OMP_NUM_THREADS=1 "$python" -m stepsnet sweep "$study" ${cells:+--cells "$cells"} \
        --data "$data" "${settings[@]}" --jobs "$jobs" --run "$work/$name" --resume --results "$work/results/$name"
    tar -czf "$out/deep.tgz" -C "$work" results
}

: >"$out/parts.jsonl"
versions='import platform, torch, torchvision, timm, transformers as t; print(platform.python_version(), *(m.__version__ for m in (torch, torchvision, timm, t)))'
echo "Python, torch, torchvision, timm, transformers: $("$python" -c "$versions" 2>&1 | tail -n 1)" >"$out/log.txt"
for name in "${parts[@]}"; do $name; done
exit $failed
