"""Labs: what RL does to a model, each an experiment (arms × seeds) with a table and a figure of its own.

``grpo-lab lab NAME`` runs ``LAB`` of ``grpo_lab/labs/NAME.py``, or ``recipes/lab/NAME/lab.yaml`` (a team's own file: by
its path), into ``runs/labs/NAME``. A new lab that trains needs only a lab.yaml; another one a module and a line here.
"""

from __future__ import annotations

LABS = {
    "kl": "value and gradient of every KL estimator, by exact enumeration (seconds)",
    "search": "tree search over steps against samples and beams, and as a source of rows (trains)",
    "overoptimisation": "proxy and truth over the distance to the start, by who taught the proxy (trains)",
}
