"""The parser of a command, and its end by a user's mistake."""

import argparse
import functools
from collections.abc import Callable

from grpo.config import KEYS_EPILOG
from grpo.telemetry.terminal import print_user_error


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of ``python -m grpo.NAME``, which takes a configuration and keys of it beside its
    options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m grpo.{name}",
        usage="%(prog)s [options] [section.key=value ...]",
        description=description,
        epilog=KEYS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run")
    return parser


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorator: the exit code of ``main(argv)``; a ``ValueError`` or ``OSError`` is printed as a
    user's mistake."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            return main(argv) or 0
        except (ValueError, OSError) as error:
            print_user_error(error)
            return 2
        except KeyboardInterrupt:
            return 130

    return run
