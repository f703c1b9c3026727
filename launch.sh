#!/usr/bin/env bash
# Set up a virtual environment, then train or test.
#
#   ./launch.sh                                          the demo, configs/tiny_arithmetic.yaml
#   ./launch.sh configs/X.yaml key=value ... [--debug]   any run: one process per GPU, or NPROC_PER_NODE processes
#   ./launch.sh --help [WORD ...]                        once installed: every key, or those with a WORD
#   ./launch.sh test [pytest options]                    the quick tests, one pytest worker per core
#
# Several machines, restarts and other options of torchrun: torchrun's own command, see docs/multi_gpu.md. Training
# installs requirements.txt, the versions that the project is tested with, and this folder as the package grpo (editable);
# `test` also the extra "dev". Environment: PYTHON (default python3), GRPO_VENV (default .venv), GRPO_NO_SETUP=1: create
# and install nothing, run PYTHON as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python="${PYTHON:-python3}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

if [[ -z "${GRPO_NO_SETUP:-}" ]]; then
  venv="${GRPO_VENV:-.venv}" package=. stamp=.installed
  [[ "${1:-}" != test ]] || package=".[dev]" stamp=.installed-dev
  install=(-r requirements.txt -e "$package")
  if [[ "${1:-}" =~ ^(--help|-h)$ && -z "$(compgen -G "$venv/.installed*")" ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' launch.sh
    exit
  fi
  if [[ ! -x "$venv/bin/python" ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or later is needed: set PYTHON")'
    echo "creating the virtual environment $venv ..."
    "$python" -m venv "$venv"
  fi
  # pip runs again only after one of the files that say what is installed has changed.
  if ! cat requirements.txt pyproject.toml launch.sh | cmp -s - "$venv/$stamp"; then
    echo "installing ${install[*]}: PyTorch and others, 3 GB if PyTorch brings CUDA (PyPI on Linux), else 0.4 GB ..."
    (while sleep 10 > /dev/null 2>&1; do echo "still at work, $SECONDS s so far ..."; done) &
    ticker=$!
    disown  # else bash prints a line about it below
    trap 'kill "$ticker" 2> /dev/null' EXIT
    "$venv/bin/python" -m pip install --disable-pip-version-check "${install[@]}" |
      { grep --line-buffered -oE 'Downloading [^ ]+ \([0-9.]+ [MG]B\)|^Installing collected packages' || true; }
    kill "$ticker"
    trap - EXIT
    cat requirements.txt pyproject.toml launch.sh > "$venv/$stamp"
  fi
  python="$venv/bin/python"
fi

case "${1:-}" in
  test) exec "$python" -m pytest -n logical --maxprocesses 8 --dist worksteal "${@:2}" ;;
  *.yaml | *.yml) set -- --config "$@" ;;
esac
[[ "${NNODES:-1}" == 1 ]] || { echo "error: several machines: torchrun's own command, see docs/multi_gpu.md" >&2; exit 2; }
# --help, and mistakes in the settings, need no PyTorch, which takes seconds to load.
check='
import sys
from grpo.config import load_config
try:
    load_config(sys.argv[1:], default_file="configs/tiny_arithmetic.yaml")
except (OSError, ValueError) as error:
    print("error:", str(error).replace("\n", "\nerror: "), file=sys.stderr)
    sys.exit(2)
'
[[ ! "${1:-}" =~ ^(--help|-h)$ ]] || exec "$python" -c "$check" "$@"
"$python" -c "$check" "$@" > /dev/null  # train_grpo.py prints the same
echo "loading PyTorch ..."
count_gpus="import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); import torch; print(torch.cuda.device_count() or 1)"
processes="${NPROC_PER_NODE:-$("$python" -c "$count_gpus")}"
[[ " $* " != *" --debug "* ]] || processes=1
if ((processes == 1)); then exec "$python" train_grpo.py "$@"; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # torchrun sets it too, with a warning
# torchrun, without its traceback after Ctrl-C and after a mistake of the user (exit code 2), which a rank has printed.
exec "$python" -c '
import logging, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
try:
    main()
except SignalException as error:
    sys.exit(128 + error.sigval)
except ChildFailedError as error:
    if error.get_first_failure()[1].exitcode != 2:
        raise
    sys.exit(2)
' --standalone --nproc_per_node="$processes" train_grpo.py "$@"
