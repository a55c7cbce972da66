"""The same as ``grpo-lab train``, for ``accelerate launch scripts/train.py --config recipes/….yaml [--key value …]``."""

import sys

from grpo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
