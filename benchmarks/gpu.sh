#!/usr/bin/env bash
# What has to be measured on a GPU, in order of value and in under nine minutes. Each part runs on its own, so that one
# that fails or takes too long loses nothing of the others.
#
#   benchmarks/gpu.sh [--device cuda] [--quick] [--out gpu-results] [--data DATA] [PART …]
#
#   tests   the device-dependent tests: every family in bfloat16, compiled, recomputed, sharded; detectors, segmenters;
#           the residual stream, in every design of it; compress; resuming to the bit
#   speed   Steps models against their baselines at batch 1 and 256, each at its best setting
#   memory  Fig. 6b to 6d: throughput, latency and memory of Table 5b's models
#   pair    a StepsNet and its baseline of 96 blocks on CIFAR-10: DATA is cifar10:PATH or folder:PATH (with --quick
#           the digits, and no DATA)
#
# The output folder has at most six small files: parts.jsonl with how each part ended, log.txt with the last lines of
# each, and speed.json, memory.json, memory.csv and pair.json. They are written as soon as there is something in them.
#
# It needs torch 2.11 or later, torchvision, timm and transformers, and of this project's requirements those of the
# extra "detection", and pytest. --device cpu --quick is a rehearsal on any machine.
set -uo pipefail
cd "$(dirname "$0")/.."
usage="expected --device DEVICE, --quick, --out FOLDER, --data DATA, or some of tests, speed, memory, pair"
device=cuda quick="" out=gpu-results data="" parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --device | --out | --data)
            [ $# -gt 1 ] && [ -n "$2" ] || { echo "gpu.sh: $1 needs a value; $usage" >&2; exit 2; }
            case "$1" in --device) device=$2 ;; --out) out=$2 ;; --data) data=$2 ;; esac
            shift
            ;;
        --quick) quick=--quick ;;
        tests | speed | memory | pair) parts+=("$1") ;;
        *) echo "gpu.sh: got $1, $usage" >&2; exit 2 ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(tests speed memory pair)
case "$data" in "" | *:*) ;; *) data=folder:$data ;; esac
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export STEPSNET_TEST_DEVICE=$device CUBLAS_WORKSPACE_CONFIG=:4096:8 # read when CUDA starts; resuming to the bit needs it
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
if ! said=$("$python" -c "import sys, torch; torch.zeros(1, device=sys.argv[1])" "$device" 2>&1); then
    echo "gpu.sh: torch cannot use the device $device (${said##*$'\n'}), expected another --device" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
deadline=$((SECONDS + 530)) # of all parts together
failed=0

# part NAME SECONDS COMMAND…: run with a limit, and record how it ended and the end of its log
part() {
    local name=$1 limit=$2 started=$SECONDS status=0 left=$((deadline - SECONDS))
    shift 2
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name, at most $limit s: $*"
    if [ "$limit" -gt 0 ]; then
        timeout --kill-after=5 "$limit" "$@" >"$work/$name.log" 2>&1 || status=$?
    else
        echo "no time was left" >"$work/$name.log"
        status=124
    fi
    tail -n 3 "$work/$name.log" | cut -c1-300
    { echo "== $name: status $status"; tail -n 200 "$work/$name.log" | cut -c1-2000; } >>"$out/log.txt"
    printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - started)) | tee -a "$out/parts.jsonl"
    [ "$status" = 0 ] || failed=1
}

# keep NAME FILE: a result, where there is one
keep() {
    [ ! -f "$2" ] || cp "$2" "$out/$1"
}

tests() {
    local workers=()
    [ -n "$quick" ] || ! "$python" -c "import xdist" 2>/dev/null || workers=(-n 5)
    part tests 140 env OMP_NUM_THREADS=2 \
        "$python" -m pytest -v -p no:cacheprovider "${workers[@]}" --durations=10 tests/test_on_device.py
}

speed() {
    local seconds=140
    [ -z "$quick" ] || seconds=30
    part speed $((seconds + 30)) \
        "$python" benchmarks/device_speed.py --device "$device" $quick --seconds $seconds --out "$out/speed.json"
}

memory() {
    local models=(table:5b) options=(--amp-dtype bfloat16 --batch-size 64 --rounds 5)
    [ -z "$quick" ] || { models=(test_steps_deit test_vit); options=(--memory 2,4 --batch-size 2 --rounds 2); }
    part memory 110 "$python" -m stepsnet bench "${models[@]}" "${options[@]}" --device "$device" --out "$work/memory"
    keep memory.json "$work/memory/speed.json"
    keep memory.csv "$work/memory/speed.csv"
}

pair() {
    local recipe=cifar10/deep options=("--data" "$data" amp_dtype=bfloat16 compile=true workers=6 batch_size=512 epochs=6)
    if [ -n "$quick" ]; then
        recipe=digits/tiny options=(epochs=1)
    elif [ -z "$data" ]; then
        part pair 5 sh -c 'echo "pair needs --data with CIFAR-10, such as cifar10:PATH"; exit 2'
        return
    fi
    part pair 110 "$python" -m stepsnet compare "$recipe" "${options[@]}" --seeds 0 --jobs 2 --run "$work/pair" "device=$device"
    keep pair.json "$work/pair/comparison.json"
}

: >"$out/parts.jsonl"
: >"$out/log.txt"
for name in "${parts[@]}"; do $name; done
exit $failed
