#!/usr/bin/env bash
# Set up a virtual environment, then train or test.
#
#   ./launch.sh                                          the demo, configs/tiny_arithmetic.yaml
#   ./launch.sh configs/X.yaml key=value ... [--debug]   any run
#   ./launch.sh --help [WORD ...]                        this text and all keys; with words, the keys that contain them
#   ./launch.sh --max-restarts=3 configs/X.yaml          options of torchrun are passed on to torchrun
#   ./launch.sh test [pytest options]                    the quick tests, one pytest worker per core (-n 0: no workers)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host MASTER_PORT=29500 NPROC_PER_NODE=8 ./launch.sh configs/X.yaml    on each machine
#
# Training starts one process per GPU, or as many fewer as share the problems of a step evenly; NPROC_PER_NODE=N starts N.
# Training installs requirements.txt, the versions that the project is tested with. `test` also installs pytest, ruff and the other
# packages of the extra "dev" of pyproject.toml. Environment variables: PYTHON, the interpreter (default python3); GRPO_VENV, the
# folder of the virtual environment (default .venv); GRPO_NO_SETUP=1, create and install nothing and run PYTHON as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="${PYTHON:-python3}"
if [[ -z "${GRPO_NO_SETUP:-}" ]]; then
  venv="${GRPO_VENV:-.venv}"
  if [[ ! -x "$venv/bin/python" ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $python is older than Python 3.11; set PYTHON" >&2; exit 2; }
    echo "creating the virtual environment $venv ..."
    "$python" -m venv "$venv" || { echo "error: $python cannot create a virtual environment (Debian: apt install python3-venv)" >&2; exit 2; }
  fi
  if [[ "${1:-}" == test ]]; then
    install=(-r requirements.txt -e ".[dev]") stamp="$venv/.installed-dev" wanted="$(cat requirements.txt pyproject.toml | cksum)"
  else
    install=(-r requirements.txt) stamp="$venv/.installed" wanted="$(cksum < requirements.txt)"
  fi
  # The stamp is a checksum of the files that name the packages: pip runs again only after one of these files has changed.
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing ${install[*]} ..."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${install[@]}"
    echo "$wanted" > "$stamp"
  fi
  python="$venv/bin/python"
fi
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

if [[ "${1:-}" == test ]]; then
  shift
  exec "$python" -m pytest -n logical --maxprocesses 8 --dist worksteal "$@"  # the caller's options come last and win
fi

# The trainer's arguments: the configuration file, key=value, --config, --debug, --help. Every other option belongs to torchrun.
trainer_options=() torchrun_options=() config=""
while (($#)); do
  case "$1" in
    --help | -h)
      (($# > 1)) || { sed -n '2,/^[^#]/{s/^#$//p;s/^# //p;}' launch.sh; echo; }
      exec "$python" train_grpo.py "$@" ;;
    --debug) trainer_options+=("$1") ;;
    --config) config="${2:-}"; shift ;;
    --config=*) config="${1#*=}" ;;
    -*=*) torchrun_options+=("$1") ;;
    -*) torchrun_options+=("$1")
        # the value of an option that is written as two words
        if (($# > 1)) && [[ "$2" != -* && "$2" != *=* && "$2" != *.yaml ]]; then torchrun_options+=("$2"); shift; fi ;;
    *=*) trainer_options+=("$1") ;;
    *) [[ -z "$config" ]] || { echo "error: two configurations, $config and $1" >&2; exit 2; }; config="$1" ;;
  esac
  (($#)) && shift
done
command=(train_grpo.py --config "${config:-configs/tiny_arithmetic.yaml}" ${trainer_options[@]+"${trainer_options[@]}"})

# One process per GPU; on CPU one process with all cores. On two cores, two ranks of one thread each are a little faster per step but
# take longer to start (docs/scaling.md).
gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
  gpus="$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)"
fi
nproc="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
for word in ${trainer_options[@]+"${trainer_options[@]}"}; do [[ "$word" == --debug && -z "${NPROC_PER_NODE:-}" ]] && nproc=1; done
# Unless a number of ranks is given: fewer than one per GPU if the problems of a step can only be shared evenly by fewer.
machines="${NNODES:-1}" given="${NPROC_PER_NODE:-}"
for word in ${torchrun_options[@]+"${torchrun_options[@]}"}; do
  case "$word" in --nnodes=*) machines="${word#*=}" ;; --nproc* | --nnodes) given=yes ;; esac
done
if [[ -z "$given" && "$machines" =~ ^[0-9]+$ ]] && ((nproc > 1)); then
  nproc="$("$python" -m grpo.config.fit_ranks "$nproc" "$machines" "${command[@]:1}")"
fi

if ((nproc == 1 && ${NNODES:-1} == 1 && ${#torchrun_options[@]} == 0)); then
  exec "$python" "${command[@]}"
fi
rendezvous=(--standalone)
for word in ${torchrun_options[@]+"${torchrun_options[@]}"}; do [[ "$word" == --rdzv* || "$word" == --nnodes* ]] && rendezvous=(); done
if ((${NNODES:-1} > 1)); then
  : "${MASTER_ADDR:?several machines need MASTER_ADDR, the address of the first one}" "${NODE_RANK:?several machines need NODE_RANK, 0 to NNODES-1}"
  rendezvous=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi
exec "$python" -m grpo.distributed.torchrun ${rendezvous[@]+"${rendezvous[@]}"} --nproc_per_node="$nproc" ${torchrun_options[@]+"${torchrun_options[@]}"} "${command[@]}"
