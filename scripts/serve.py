"""The same as ``grpo-lab serve``: a vLLM server at 127.0.0.1 for ``vllm_mode: server``."""

import sys

from grpo_lab.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
