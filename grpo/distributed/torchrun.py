"""torchrun, with an end in which a rank's error stays last on the terminal: ``python -m grpo.distributed.torchrun``.

Options, signals, restarts and exit codes are torchrun's. After a failure torchrun would print its own stack and a table
of ranks. Left of it is one line for each rank that failed ("failed (exitcode: -9) local_rank: 1"), unless that rank has
printed an error that the user can fix (exit code 2).
"""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_ELASTIC = "torch.distributed.elastic.multiprocessing"
_LOGGERS = ("torch.distributed.run", f"{_ELASTIC}.api", f"{_ELASTIC}.errors.error_handler")
_LEFT_OUT = ("OMP_NUM_THREADS", "closing signal SIGTERM", "failed (exitcode: 2)", "no error file defined")


def main() -> int:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not any(text in record.getMessage() for text in _LEFT_OUT))
    try:
        run.main()
    except (ChildFailedError, SignalException):  # the logger has told it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
