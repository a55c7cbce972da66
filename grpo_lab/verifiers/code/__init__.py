"""Programs that a model wrote, run against tests behind walls. ``judge`` runs in a worker; see docs/algorithms/code_reward.md."""
