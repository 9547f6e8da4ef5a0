"""The `draftsmith` command: thin, every subcommand (`scripts.commands`) only parses and calls the module that does the work.

What a user can put right is a `ValueError` below and one line here, with exit status 2.
"""

import argparse
import shlex
import sys

from draftsmith.scripts.commands import cache, data, doctor, evaluate, generate, train


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="draftsmith", description="Train, verify and measure draft heads.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (data, doctor, cache, train, evaluate, generate):
        module.add(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        # argparse does not collect configs and key=value behind an option such as --dry-run
        if not hasattr(options, "words") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.words = [*options.words, *rest]
    options.command_line = shlex.join(["draftsmith", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.run(options)
    except ValueError as error:
        sys.exit(_fail(options.command, str(error)))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(options.command, f"{where}{error.strerror or error}; free space or choose another path"))
    except KeyboardInterrupt:
        print(f"\ndraftsmith {options.command}: interrupted; the same command continues where it can", file=sys.stderr)
        sys.exit(130)


def _fail(command: str, message: str) -> int:
    print(f"draftsmith {command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
