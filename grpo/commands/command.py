"""The parser of a command, and the exit code of a command that a user's mistake ends."""

import argparse
import functools
from collections.abc import Callable

from grpo.config import KEYS_EPILOG
from grpo.telemetry.terminal import print_user_error


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of ``python -m grpo.NAME``, with the option ``--config``.

    Arguments of the form ``section.key=value`` remain for :meth:`parse_known_args`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m grpo.{name}",
        usage="%(prog)s [options] [section.key=value ...]",
        description=description,
        epilog=KEYS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An unknown option is an error of the configuration, and not an abbreviation of another
        # option.
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run")
    return parser


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorate ``main(argv)`` so that it returns an exit code and prints a user's mistake.

    A ``ValueError`` or ``OSError`` is printed without a traceback, with the exit code 2.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            return main(argv) or 0
        except (ValueError, OSError) as error:
            print_user_error(error)
            return 2
        except KeyboardInterrupt:
            # The code of a shell for a program that Ctrl-C has ended: 128 + SIGINT.
            return 130

    return run
