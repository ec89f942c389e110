"""`python -m torch_join doctor`, alone or under torchrun: checks that a machine or a job can run torch_join."""

import argparse
import sys
from collections.abc import Sequence

from torch_join._doctor.run import examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m torch_join", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check versions, the connections between the ranks, and one uneven epoch",
        description=(
            "Alone, it starts three ranks on this machine; under torchrun, it uses the job's. It prints a line for each"
            " check, and exits with 1 if one fails."
        ),
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON document in place of the lines")
    return examine(parser.parse_args(arguments).json)


if __name__ == "__main__":
    sys.exit(main())
