#!/bin/bash
# Train into a store of S3's protocol, kill, resume on two ranks, and run every command on checkpoints. Fails at the first
# difference. Usage: s3_train.sh PYTHON CONFIG FOLDER s3://BUCKET/RUN (AWS_ENDPOINT_URL and credentials are set)
set -euo pipefail
python=$1 config=$2 folder=$3 url=$4
titanlite() { "$python" -m titanlite "$@"; }
options=(--config "$config" --job.dump_folder="$folder" --job.name=run --checkpoint.folder="$url" --checkpoint.interval=5
    --training.steps=30 --metrics.log_freq=1 --metrics.loggers='[]' --checkpoint.keep_latest_k=3)

echo "## one rank, SIGKILL after a checkpoint"
"$python" -m titanlite train "${options[@]}" --training.steps=100000 >"$folder/1.log" 2>&1 &
until grep -q "^saved checkpoint of step 5" "$folder/1.log"; do
    kill -0 $! || { cat "$folder/1.log"; exit 1; }
    sleep 0.2
done
kill -9 $!
wait $! || true
echo "## resume on two ranks"
"$python" -m torch.distributed.run --nproc_per_node 2 -m titanlite train "${options[@]}" >"$folder/2.log" 2>&1 ||
    { cat "$folder/2.log"; exit 1; }
grep -qE "resuming after step [0-9]+," "$folder/2.log"
titanlite checkpoint list "$url" | tee "$folder/list.txt"
grep -q 30 "$folder/list.txt"
titanlite checkpoint verify "$url"
titanlite checkpoint show "$url" >"$folder/show.txt"
titanlite checkpoint export "$url" --out "$folder/exported" >"$folder/export.txt" 2>&1
ls "$folder/exported"/*.safetensors
titanlite checkpoint prune "$url" --keep-latest-k 1
[[ $(titanlite checkpoint list "$url" | grep -c whole) == 1 ]]
echo "## a bucket that is not there"
code=0
titanlite train "${options[@]}" --job.name=other --checkpoint.folder=s3://no-such-bucket/run >"$folder/3.log" 2>&1 || code=$?
cat "$folder/3.log"
[[ $code == 2 ]]
grep -q "^error: checkpoint.folder: .*there is no bucket no-such-bucket" "$folder/3.log"
echo "## wrong credentials"
code=0
AWS_SECRET_ACCESS_KEY=wrong titanlite train "${options[@]}" --training.steps=40 >"$folder/4.log" 2>&1 || code=$?
cat "$folder/4.log"
[[ $code == 2 ]]
echo "## all is right"
