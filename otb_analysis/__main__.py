"""`python -m otb_analysis` is `otb`."""

import sys

from otb_analysis.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
