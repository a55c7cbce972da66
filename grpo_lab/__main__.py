"""Run the command line `grpo-lab` by `python -m grpo_lab`."""

import sys

from grpo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
