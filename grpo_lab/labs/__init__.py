"""Labs: experiments of arms × seeds, each with a table and a figure.

``grpo-lab lab NAME`` runs a lab into ``runs/labs/NAME``. A lab is written in one of two ways: as the ``LAB`` of the
module ``grpo_lab/labs/NAME.py``, which is then listed in ``LABS``, or as the file ``recipes/lab/NAME/lab.yaml``. A
team's own lab.yaml is run by its path. A new lab that trains needs only a lab.yaml.
"""

from __future__ import annotations

LABS = {
    "kl": "value and gradient of every KL estimator, by exact enumeration (seconds)",
    "search": "tree search over steps against samples and beams, and as a source of rows (trains)",
    "overoptimisation": "proxy and truth over the distance to the start, by who taught the proxy (trains)",
}
"""Labs that are modules: name → a line about the lab."""
