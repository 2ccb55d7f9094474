"""`python -m torchlens`, and the command `torchlens`."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `torchlens --help` lists both."""
    from torchlens.extract.command_line import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
