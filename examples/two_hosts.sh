#!/usr/bin/env bash
# HSDP over two hosts: parameters are sharded within a host and replicated between them, so that only gradients cross the
# network. Run it on both hosts, at any time within half an hour, with a folder that both see:
#
#     FIRST=node0 FOLDER=/shared/outputs examples/two_hosts.sh [options of the config]
#
# CONFIG (default: llama3_8b) and NPROC (default: the GPUs of a host) can be set, too. docs/cluster.md explains more.
set -euo pipefail
: "${FIRST:?the name of the first host}" "${FOLDER:?a folder that both hosts see}"
export NNODES=2 RDZV_ENDPOINT=$FIRST:29500
exec "$(dirname "${BASH_SOURCE[0]}")/../run_train.sh" --config "${CONFIG:-llama3_8b}" --job.dump_folder="$FOLDER" \
    --parallelism.data_parallel_replicate_degree=2 "$@"
