"""Everything private of TRL (and of the Trainer below it) that this room relies on, in one place.

``tests/contract/test_trl_bridge.py`` pins each name, signature and behaviour listed here. When TRL moves, this folder
and that test are what changes; nothing outside ``grpo_lab/trainer/`` imports ``trl``.

    names       what is overridden, called, read      forwards   log-probs in bins and what replaces TRL's
    gradients   backward, sharding, loading           logs       metrics and tables that TRL has written
    rewards     what TRL calls a reward               replace    a name stands for something else inside a block
    reference   TRL's reference beside the policy
    overrides   whether a method is a team's
    values      a critic inside the policy's module
    fsdp_optimizer  FSDP2's optimizer, saved and loaded as it is
"""

# ruff: noqa: F401 (what the room offers)
from grpo_lab.trainer.trl_bridge.forwards import (
    backbone,
    completion_log_probs,
    forwards_replaced,
    is_compiled,
    positions_given,
    stock_forward,
    wants_old_log_probs,
    without_autocast,
    without_checkpointing,
)
from grpo_lab.trainer.trl_bridge.fsdp_optimizer import (
    optimizer_loaded_as_it_was,
    optimizer_saved_as_it_is,
    without_moments,
)
from grpo_lab.trainer.trl_bridge.gradients import (
    SAMPLING_METRICS,
    backward,
    copy_to_reference,
    forget_sampling_metrics,
    leave_out_step,
    load_policy_adapter,
    logged_rows,
    overflow_of_scaler,
    plain_cpu,
    put_aside,
    reference_model_in_full,
    reference_tensors,
    replace_logged_advantages,
    replace_logged_rows,
    step_was_taken,
    whole_by_names,
    without_gradient_sync,
)
from grpo_lab.trainer.trl_bridge.names import (
    ATTRIBUTES,
    COMPLETION_FIELDS,
    METHODS,
    MULTIMODAL_FIELDS,
    is_multimodal,
    may_bring_images,
    replaced,
)
from grpo_lab.trainer.trl_bridge.overrides import hf_runs_the_step, teams
from grpo_lab.trainer.trl_bridge.release import SUPPORTED_TRL
from grpo_lab.trainer.trl_bridge.values import (
    CRITIC,
    critic_of,
    followed_by_policy_only,
    give_critic,
    inside,
    is_critics,
    policy_parameters,
    values_heard,
    without_critic,
)
