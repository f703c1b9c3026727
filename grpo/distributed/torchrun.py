"""torchrun, with an end in which the error of a rank stays the last thing on the terminal: ``python -m grpo.distributed.torchrun ...``.

Options, signals, restarts and exit codes are torchrun's. After a failure torchrun prints its own stack and a table of ranks,
which say nothing about the error. Here one line names the rank that failed first, unless that rank has printed an error that the user can fix.
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

USER_ERROR = 2
"""Exit code of a rank that has printed an error which the user can fix."""
_ELASTIC = "torch.distributed.elastic.multiprocessing"
_LOGGERS = ("torch.distributed.run", f"{_ELASTIC}.api", f"{_ELASTIC}.errors.error_handler")
_WITHOUT_NEWS = (
    "OMP_NUM_THREADS",  # the trainer chooses the number of threads
    "closing signal SIGTERM",  # to the other ranks, after one has failed
    f"failed (exitcode: {USER_ERROR})",
    "no error file defined for parent",
)


def main() -> int:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_has_news)
    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            print(f"note: rank {rank} {_ending(failure)}", file=sys.stderr, flush=True)
        return 1
    except SignalException as error:
        print(f"note: torchrun ended after {error.sigval.name}", file=sys.stderr, flush=True)
        return 1
    return 0


def _has_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(words in text for words in _WITHOUT_NEWS)


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"(process {failure.pid}) ended with exit code {failure.exitcode}"
    hint = ": the machine may be out of memory" if failure.exitcode == -signal.SIGKILL else ""
    return f"(process {failure.pid}) was ended by {failure.signal_name()}{hint}"


if __name__ == "__main__":
    sys.exit(main())
