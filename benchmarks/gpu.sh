#!/usr/bin/env bash
# What has to be measured on a GPU, in order of value and in under nine minutes. Each part runs on its own, so that one
# that fails or takes too long loses nothing of the others; each leaves a small JSON in the output folder.
#
#   benchmarks/gpu.sh [--device cuda] [--quick] [--out gpu-results] [--data CIFAR10_FOLDER] [PART …]
#
#   tests   the device-dependent tests: every family in bfloat16, compiled, recomputed, sharded; resuming to the bit
#   speed   Steps models against their baselines at batch 1 and 256, each at its best setting
#   memory  Fig. 6b to 6d: throughput, latency and memory of Table 5b's models
#   pair    a StepsNet and its baseline of 96 blocks on CIFAR-10; needs --data (or uses the digits with --quick)
#
# It needs torch 2.11 or later, torchvision, timm and transformers, and of this project's requirements those of the
# extra "detection". --device cpu --quick is a rehearsal on any machine.
set -uo pipefail
cd "$(dirname "$0")/.."
device=cuda quick="" out=gpu-results data="" parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --device | --out | --data)
            [ $# -gt 1 ] || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
            case "$1" in --device) device=$2 ;; --out) out=$2 ;; --data) data=$2 ;; esac
            shift
            ;;
        --quick) quick=--quick ;;
        tests | speed | memory | pair) parts+=("$1") ;;
        *) echo "gpu.sh: got $1, expected --device, --quick, --out, --data, or tests, speed, memory, pair" >&2; exit 2 ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(tests speed memory pair)
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0

# part SECONDS COMMAND…: run with a limit, keep the log, and write how it ended
part() {
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    echo "== $name: $*"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    tail -n 3 "$out/$name.log" | cut -c1-300
    printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - started)) | tee "$out/$name-status.json"
    [ "$status" = 0 ] || failed=1
}

tests() {
    local workers=()
    [ -n "$quick" ] || ! "$python" -c "import xdist" 2>/dev/null || workers=(-n 4)
    part tests 170 env STEPSNET_TEST_DEVICE="$device" OMP_NUM_THREADS=2 \
        "$python" -m pytest -q -p no:cacheprovider "${workers[@]}" --durations=5 tests/test_on_device.py
}

speed() {
    part speed 210 "$python" benchmarks/device_speed.py --device "$device" $quick --seconds 190 --out "$out/speed.json"
}

memory() {
    local models=(table:5b) options=(--amp-dtype bfloat16 --batch-size 64 --rounds 10)
    [ -z "$quick" ] || { models=(test_steps_deit test_vit); options=(--memory 2,4 --batch-size 2 --rounds 2); }
    part memory 90 "$python" -m stepsnet bench "${models[@]}" "${options[@]}" --device "$device" --out "$out/memory"
}

pair() {
    local recipe=cifar10/deep options=("--data" "$data" amp_dtype=bfloat16 compile=true workers=6 batch_size=512 epochs=6)
    if [ -n "$quick" ]; then
        recipe=digits/tiny options=(epochs=1)
    elif [ -z "$data" ]; then
        echo "gpu.sh: pair needs --data with CIFAR-10" >&2
        failed=1
        return
    fi
    part pair 170 "$python" -m stepsnet compare "$recipe" "${options[@]}" --seeds 0 --jobs 2 --run "$out/pair" "device=$device"
    cp "$out/pair/comparison.json" "$out/pair.json" 2>/dev/null
}

for name in "${parts[@]}"; do $name; done
exit $failed
