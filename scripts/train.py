"""Run ``grpo-lab train`` as a script, which launchers of several processes need.

    accelerate launch scripts/train.py --config recipes/….yaml [--key value …]

Options, output and exit code are those of the command.
"""

import sys

from accelerate import PartialState

from grpo_lab.cli import main
from grpo_lab.io import EXIT_INTERRUPTED

if __name__ == "__main__":
    code = main(["train", *sys.argv[1:]])
    if code in (0, EXIT_INTERRUPTED):  # all processes come here
        PartialState().destroy_process_group()  # gloo's threads would race with the interpreter's end
    sys.exit(code)
