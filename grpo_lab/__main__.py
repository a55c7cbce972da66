"""The command line as ``python -m grpo_lab``, for when its script is not on the path."""

import sys

from grpo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
