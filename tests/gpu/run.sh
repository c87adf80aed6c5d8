#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs verify, bench and the device tests on a real accelerator, and ends with a short table. README.md beside this
# file says more.
#
#   tests/gpu/run.sh all                    every packed host; without a pack, the installed one
#   tests/gpu/run.sh HOST                   one host: a packed version, or "installed"
#   tests/gpu/run.sh HOST COMMAND [ARG...]  a command of your own with that host importable
#
# Environment: OUT         folder that gets the table and one archive of results per host, after every step
#              OSA_ROOT    folder to unpack a pack into              (/tmp/osa)
#              PYTHON      interpreter                               (python3)
#              DEVICE      device that must be here: cuda or npu     (cuda)
#              STEPS       which of: verify bench features voices tests
#              STEP_LIMIT  seconds after which a step is stopped     (1800)
#              BENCH_ARGS, TEST_ARGS  more arguments for bench, for pytest
set -u -o pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$repo" || exit 2
python=${PYTHON:-python3}
root=${OSA_ROOT:-/tmp/osa}
results=$repo/results/gpu
device=${DEVICE:-cuda}
pack=$repo/.gpu
export PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} HF_HUB_OFFLINE=1
export OMNI_SPEECH_ACCEL_TEST_DEVICE=$device
# The full-size model directory (1.2 GB) is written once for all hosts and steps.
export OSA_TEST_CHECKPOINT=${OSA_TEST_CHECKPOINT:-$root-checkpoint}

usage() { sed -n '3,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }

packed_hosts() {
    [ -f "$pack/MANIFEST.json" ] || return 0
    "$python" -c 'import json, sys; print(*json.load(open(sys.argv[1]))["hosts"])' "$pack/MANIFEST.json"
}

# Makes HOST importable: sets PYTHONPATH. An installed host needs the repository alone.
use_host() {
    if [ "$1" = installed ]; then
        unset OSA_PACK_HOST OSA_PACK_ROOT
        export PYTHONPATH=$repo
        return
    fi
    "$python" tools/gpu_pack.py unpack "$pack" "$root" >&2 || exit 2
    if [ ! -d "$root/host-$1" ]; then
        echo "no host $1 in the pack; it holds: $(packed_hosts)" >&2
        exit 2
    fi
    export OSA_PACK_HOST=$1 OSA_PACK_ROOT=$root/host-$1
    export PYTHONPATH=$repo:$root/shared:$root/host-$1
}

rows=()

table() {
    printf '%-12s %-9s %-8s %6s    %s\n' host step result time 'last line'
    printf '%s\n' "${rows[@]}"
}

# What there is so far, in few files: a run that is stopped from outside still leaves the steps that it has done.
hand_over() {
    table >"$results/table.txt"
    [ -n "${OUT:-}" ] || return 0
    cp "$results/table.txt" "$OUT/table.txt"
    tar -czf "$OUT/$1.tar.gz" --exclude='*.wav' -C "$results" "$1"
}

# step HOST NAME COMMAND...: runs it with its output in results/gpu/HOST/NAME.log, and keeps a row for the table.
step() {
    local host=$1 name=$2 began=$SECONDS rc=0 result=ok log=$results/$1/$2.log
    shift 2
    echo "== $host: $name" >&2
    timeout "${STEP_LIMIT:-1800}" "$@" >"$log" 2>&1 || rc=$?
    if [ $rc != 0 ]; then
        result="FAIL $rc"
        failed=1
        tail -n 40 "$log" >&2
    fi
    rows+=("$(printf '%-12s %-9s %-8s %6d s  %s' "$host" "$name" "$result" $((SECONDS - began)) \
        "$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c1-90)")")
    hand_over "$host"
}

all_steps() {
    local host=$1 cli=("$python" -m omni_speech_accel) mark=gpu model name dir=$results/$1
    use_host "$host"
    [ "$device" != npu ] || mark=npu
    mkdir -p "$dir"
    model=$("$python" -m tests.gpu.harness 2>"$dir/checkpoint.log" | tail -n 1)
    if [ ! -d "$model" ]; then
        tail -n 40 "$dir/checkpoint.log" >&2
        rows+=("$host: the model directory could not be written")
        failed=1
        return
    fi
    for name in ${STEPS:-verify bench features voices tests}; do
        # shellcheck disable=SC2086  # BENCH_ARGS and TEST_ARGS are lists of words.
        case $name in
            verify) step "$host" verify "${cli[@]}" verify --device "$device" --model "$model" --out "$dir" --overwrite ;;
            bench) step "$host" bench "${cli[@]}" bench --device "$device" --model "$model" --out "$dir/bench" --overwrite ${BENCH_ARGS:-} ;;
            features) step "$host" features "$python" -m tests.gpu.bench_prompt_features --out "$dir" ;;
            voices) step "$host" voices "$python" -m tests.gpu.bench_different_voices "$(host_version)" --out "$dir" ;;
            tests) step "$host" tests "$python" -m pytest tests/gpu -m "$mark" ${TEST_ARGS:-} ;;
            *) echo "unknown step $name" >&2; exit 2 ;;
        esac
    done
}

host_version() { "$python" -c 'from importlib.metadata import version; print(version("vllm-omni"))'; }

[ $# -ge 1 ] || usage
host=$1
shift
if [ $# -gt 0 ]; then
    [ "$host" != all ] || usage
    use_host "$host"
    [ "$1" != pytest ] || set -- "$python" -m "$@"
    [ "$1" != python ] && [ "$1" != python3 ] || set -- "$python" "${@:2}"
    exec "$@"
fi
hosts=$host
if [ "$host" = all ]; then
    hosts=$(packed_hosts)
    hosts=${hosts:-installed}
fi
failed=0
mkdir -p "$results" ${OUT:+"$OUT"}
for host in $hosts; do all_steps "$host"; done
echo
table
exit $failed
