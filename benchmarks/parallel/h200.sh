#!/bin/bash
# Everything on the GPUs of one host, each step in processes of its own and with a limit of seconds:
#   benchmarks/parallel/h200.sh GPUS [STEP...]        rows under $OUT (default: benchmarks/results)
#   DEVICE=cpu TINY=1 OUT=/tmp/rows benchmarks/parallel/h200.sh 2      the same on a CPU, tiny
# Steps: links verify parity one fsdp tp async pp dptp dppp tppp large checkpoint train (default: all
# that the number of GPUs has). The limits are about twice what a step is expected to take; all
# together: two GPUs 460 s, four 510 s. A rank that hangs ends itself after 40 s (run_3d.py --hang-s),
# and with it its step. Nothing here uses NVLink multicast; keep the three variables below.
set -u
GPUS=$1; shift
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TORCHINDUCTOR_COMPILE_THREADS=4
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/ridgeline_inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/ridgeline_triton}
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$ROOT/benchmarks/results}
LOGS=${LOGS:-$OUT/logs}
mkdir -p "$OUT" "$LOGS"
FLAGS=(--device "${DEVICE:-cuda}" --out "$OUT")
[ -n "${TINY:-}" ] && FLAGS+=(--tiny)
[ -n "${COMMIT:-}" ] && FLAGS+=(--commit "$COMMIT")

launch() ( # SECONDS RANKS COMMAND...: the ranks of one run; the first that fails ends the others
    limit=$1 ranks=$2 rc=0
    [ "${DEVICE:-cuda}" = cpu ] && limit=$((limit * 10))
    shift 2
    port=$((20000 + RANDOM % 20000))
    for ((r = 0; r < ranks; r++)); do
        RANK=$r LOCAL_RANK=$r WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port timeout -k 2 "$limit" "$@" &
    done
    for ((r = 0; r < ranks; r++)); do
        wait -n || { rc=$? && kill $(jobs -p) 2>/dev/null; }
    done
    exit $rc
)

step() { # NAME SECONDS RANKS COMMAND...: runs it, and says how it ended and what it found
    local name=$1 limit=$2 ranks=$3 start=$SECONDS rc
    shift 3
    launch "$limit" "$ranks" "$@" >"$LOGS/$name.log" 2>&1
    rc=$?
    echo "== $name: exit code $rc, $((SECONDS - start)) s of $limit"
    grep -E '^(links|verify|parity|speed|checkpoint): ' "$LOGS/$name.log" | cut -c1-220
    [ $rc = 0 ] || grep -vE '^ +File|Warning' "$LOGS/$name.log" | tail -n 6 | cut -c1-240
    return $rc
}

run_3d() { # NAME SECONDS RANKS FLAGS...
    local name=$1 limit=$2 ranks=$3
    shift 3
    step "$name" "$limit" "$ranks" "$PYTHON" "$ROOT/benchmarks/parallel/run_3d.py" "${FLAGS[@]}" "$@"
}

speed() { # NAME LAYOUT FLAGS...: once more with more recomputation where the memory did not do
    local name=$1 layout=$2
    shift 2
    run_3d "$name" 150 "$GPUS" --parts speed --only "$layout" "$@" && return
    grep -q OutOfMemoryError "$LOGS/$name.log" || return
    run_3d "$name-selective" 100 "$GPUS" --parts speed --only "$layout" --checkpointing selective "$@" ||
        run_3d "$name-full" 100 "$GPUS" --parts speed --only "$layout" --checkpointing full "$@"
}

one() { # one GPU: two at a time where there are two
    CUDA_VISIBLE_DEVICES=0 run_3d one-8b 150 1 --parts speed --state bfloat16 --steps 4 >"$LOGS/one-8b.out" &
    local first=$!
    [ "$GPUS" -gt 1 ] && export CUDA_VISIBLE_DEVICES=1
    run_3d one-1b 150 1 --parts speed --model llama-1b --samples 4 --steps 6
    unset CUDA_VISIBLE_DEVICES
    wait $first
    cat "$LOGS/one-8b.out"
}

train() { # the command itself, by torchrun: some steps, then more under another layout
    local folder=$LOGS/train flags shape=(--model.preset smollm2-135m --data.seqlen 2048 --dtype bfloat16)
    [ -n "${TINY:-}" ] && shape=(--model.preset tiny --data.seqlen 64)
    [ "${DEVICE:-cuda}" = cuda ] && shape+=(--log.peak-tflops 989)
    rm -rf "$folder" && mkdir -p "$folder"
    cat "$ROOT"/docs/*.md "$ROOT"/ridgeline/*/*.py >"$folder/text.txt"
    flags=(--device "${DEVICE:-cuda}" --run-dir "$folder/run" --steps 20 --batch-samples 16
        --micro-batch-samples 2 --data.files "$folder/text.txt" --data.tokenizer byte
        --data.documents file --data.eval-fraction 0 --data.cache "$folder/tokens" --timeout-s 40
        --checkpoint.every-steps 10 --log.every-steps 5
        --checkpoint.accept-changes)
    local torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS" --master-addr 127.0.0.1)
    for layout in "--layout.dp-shard $GPUS" "--layout.dp-shard $((GPUS / 2)) --layout.pp 2"; do
        timeout -k 40 90 "${torchrun[@]}" --master-port $((20000 + RANDOM % 20000)) -m ridgeline train \
            "${flags[@]}" "${shape[@]}" $layout >>"$LOGS/train.log" 2>&1
        echo "== train $layout: exit code $?"
        grep -E '^(step [0-9]+ of|resuming)|^train .*(from step|resuming)' "$LOGS/train.log" | tail -n 2
        flags=("${flags[@]/#20/30}")
    done
}

ALL=(links verify parity)
[ "$GPUS" -le 2 ] && ALL+=(one)
[ "$GPUS" -gt 1 ] && ALL+=(fsdp tp async)
[ "$GPUS" = 2 ] && ALL+=(pp)
[ "$GPUS" -ge 4 ] && ALL+=(dptp dppp tppp)
[ "$GPUS" -ge 8 ] && ALL+=(cube)
[ "$GPUS" -ge 4 ] && ALL+=(large)
[ "$GPUS" -gt 1 ] && ALL+=(checkpoint train)
[ $# -gt 0 ] && ALL=("$@")
HALF=$((GPUS / 2))
for name in "${ALL[@]}"; do
    case $name in
    links) run_3d links 60 "$GPUS" --parts links ;;
    verify) run_3d verify 120 "$GPUS" --parts verify ;;
    parity) run_3d parity 150 "$GPUS" --parts parity ;;
    one) one ;;
    fsdp) speed fsdp "DP$GPUS (ZeRO-3)" --steps 4 ;;
    tp) speed tp "TP$GPUS+SP" --steps 4 ;;
    async) speed async "TP$GPUS+SP" --steps 4 --async-tp ;;
    pp) speed pp "PP2 (1f1b)" --steps 2 ;;
    dptp) speed dptp "DP$HALF (ZeRO-3) x TP2+SP" --steps 4 ;;
    dppp) speed dppp "DP$HALF (ZeRO-3) x PP2 (1f1b)" --steps 2 ;;
    tppp) speed tppp "TP$HALF+SP x PP2 (1f1b)" --steps 2 ;;
    cube) speed cube "DP$((GPUS / 4)) (ZeRO-3) x TP2+SP x PP2 (1f1b)" --steps 2 ;;
    large) run_3d large 200 "$GPUS" --parts large --state bfloat16 --steps 3 --microbatches 4 ;;
    checkpoint) run_3d checkpoint 150 "$GPUS" --parts checkpoint ;;
    train) train ;;
    *) echo "h200.sh: unknown step $name" && exit 2 ;;
    esac
done
echo "rows: $(cat "$OUT"/*/train.jsonl 2>/dev/null | wc -l) in $OUT"
