"""Helpers for the commands: the parser of arguments, and the exit code after a user's mistake."""

import argparse
import functools
import sys
from collections.abc import Callable

from grpo.config import KEYS_EPILOG
from grpo.system import ignore_broken_pipes
from grpo.telemetry.terminal import print_user_error


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of ``python -m grpo.NAME``, with the option ``--config``.

    ``parse_known_args`` returns arguments of the form ``section.key=value`` as unknown arguments.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m grpo.{name}",
        usage="%(prog)s [options] [section.key=value ...]",
        description=description,
        epilog=KEYS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviated option is not accepted here. It is left to the configuration, which refuses
        # it.
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run")
    return parser


def command(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Decorate ``main(argv)`` so that it returns an exit code and prints a user's mistake. The
    default of ``argv`` is the command line of this process.

    A ``ValueError`` or ``OSError`` is printed without a traceback, and the exit code is 2. The
    command goes on if nobody reads its output any more.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        if argv is None:
            argv = sys.argv[1:]
        try:
            ignore_broken_pipes()
            return main(argv) or 0
        except (ValueError, OSError) as error:
            print_user_error(error)
            return 2
        except KeyboardInterrupt:
            # A shell gives this code to a program that Ctrl-C has ended: 128 + SIGINT.
            return 130

    return run
