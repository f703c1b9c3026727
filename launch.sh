#!/usr/bin/env bash
# Set up, then train. Everything after the first line of each example is optional.
#
#   ./launch.sh                                          the demo, configs/tiny_arithmetic.yaml
#   ./launch.sh test [pytest options]                    all tests
#   ./launch.sh configs/X.yaml key=value ... [--debug]   any run
#   ./launch.sh --max-restarts=3 configs/X.yaml          options of torchrun go through to torchrun
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host MASTER_PORT=29500 NPROC_PER_NODE=8 ./launch.sh configs/X.yaml    on each machine
#
# PYTHON names another interpreter than python3; GRPO_VENV another folder than .venv; GRPO_NO_SETUP=1 uses what is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

requirements=requirements.txt
[[ "${1:-}" == test ]] && requirements=requirements-dev.txt

python="${PYTHON:-python3}"
if [[ -z "${GRPO_NO_SETUP:-}" ]]; then
  venv="${GRPO_VENV:-.venv}"
  if [[ ! -x "$venv/bin/python" ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $python is older than Python 3.11; set PYTHON" >&2; exit 2; }
    echo "setting up $venv ..."
    "$python" -m venv "$venv" || { echo "error: $python cannot make a virtual environment (Debian: apt install python3-venv)" >&2; exit 2; }
  fi
  stamp="$venv/.installed-$requirements"
  wanted="$(cat requirements*.txt | cksum)"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing $requirements ..."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    echo "$wanted" > "$stamp"
  fi
  python="$venv/bin/python"
fi
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

if [[ "${1:-}" == test ]]; then
  shift
  exec "$python" -m pytest "$@"
fi

# Ours: the configuration file, key=value, --config, --debug, --help. Everything else is torchrun's.
ours=() torchruns=() config=""
while (($#)); do
  case "$1" in
    --debug | --help | -h) ours+=("$1") ;;
    --config) config="${2:-}"; shift ;;
    --config=*) config="${1#*=}" ;;
    -*=*) torchruns+=("$1") ;;
    -*) torchruns+=("$1")
        # an option with its value in the next word
        if (($# > 1)) && [[ "$2" != -* && "$2" != *=* && "$2" != *.yaml ]]; then torchruns+=("$2"); shift; fi ;;
    *=*) ours+=("$1") ;;
    *) [[ -z "$config" ]] || { echo "error: two configurations, $config and $1" >&2; exit 2; }; config="$1" ;;
  esac
  (($#)) && shift
done
command=(train_grpo.py --config "${config:-configs/tiny_arithmetic.yaml}" ${ours[@]+"${ours[@]}"})

# One process per GPU. On CPU one process with all cores: two ranks of one thread each took 6 to 16% less a step (configs/gsm8k_cpu.yaml on two
# cores, seconds a step, alternating: 7.3 6.9 8.2 6.8), but start later, and one of them builds the tiny model alone.
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
  gpus="$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)"
fi
nproc="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
for word in ${ours[@]+"${ours[@]}"}; do [[ "$word" == --debug && -z "${NPROC_PER_NODE:-}" ]] && nproc=1; done

if ((nproc == 1 && ${NNODES:-1} == 1 && ${#torchruns[@]} == 0)); then
  exec "$python" "${command[@]}"
fi
where=(--standalone)
for word in ${torchruns[@]+"${torchruns[@]}"}; do [[ "$word" == --rdzv* || "$word" == --nnodes* ]] && where=(); done  # a meeting place of yours
if ((${NNODES:-1} > 1)); then
  : "${MASTER_ADDR:?several machines need MASTER_ADDR, the first one\'s address}" "${NODE_RANK:?several machines need NODE_RANK, 0 to NNODES-1}"
  where=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi
exec "$python" -m torch.distributed.run ${where[@]+"${where[@]}"} --nproc_per_node="$nproc" ${torchruns[@]+"${torchruns[@]}"} "${command[@]}"
