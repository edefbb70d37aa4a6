"""`python -m otb_analysis` is `otb`."""

from otb_analysis.commands.cli import main

if __name__ == "__main__":
    main()
