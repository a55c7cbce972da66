"""Run the command line `grpo-lab` as a module of Python."""

import sys

from grpo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
