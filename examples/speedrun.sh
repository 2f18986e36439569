#!/usr/bin/env bash
# The whole pipeline in one script, in minutes on a laptop: tokenizer, data, training, loss, text, and an export that is
# compared with transformers.
#
#     examples/speedrun.sh [FOLDER] [options of `titanlite train`]      # FOLDER: outputs/speedrun
#
# The text is the source of Python's standard library; put your own into DATA and VALIDATION.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
find_python start
titanlite() { "$PYTHON" -m titanlite "$@"; }

folder=${1:-outputs/speedrun}
(($#)) && shift
data=${DATA:-stdlib://train}
validation=${VALIDATION:-stdlib://validation}
mkdir -p "$folder"

titanlite data tokenizer "$data" --out "$folder/tokenizer" --vocab-size 2048
titanlite data prepare "$data" --out "$folder/tokens" --tokenizer "$folder/tokenizer"
titanlite train debug --job.dump_folder="$folder" --job.name=run \
    --data.path="$folder/tokens" --data.tokenizer="$folder/tokenizer" --validation.path="$validation" "$@"
titanlite evaluate "$folder/run" --sequences 64
titanlite generate "$folder/run" --prompt "def " --max-new-tokens 64 --temperature 0.8
titanlite checkpoint export "$folder/run" --out "$folder/hf" --check
