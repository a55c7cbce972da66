"""Everything private of TRL, and of transformers' Trainer below it, that grpo_lab relies on, in one place.

``tests/contract/test_trl_bridge.py`` pins each name, signature and behaviour. When TRL moves, this folder and that test
are what changes; nothing outside ``grpo_lab/trainer/`` imports ``trl``.

names             names that are overridden, called or read; whether a method is a user's; replacing a name in a block
forwards          log-probs of bins, and forwards in the place of TRL's
kept              log-probs among the tokens that an engine kept (top-p, top-k, min-p)
shared_attention  a group's prompt computed once: the packed row, and the attentions that read it
packed_layout     where the sequences are in a packed row
flex_mask         FlexAttention on packed rows
varlen            flash attention on packed rows
gradients         backward, sharding, FSDP2's optimizer, loading; the reference beside the policy; TRL's metrics
rewards           TRL's names of rewards, and its own shaping rewards (imported by name)
environments      classes and rewards of environments, and which of their methods are no tools
values            a critic inside the policy's module
"""

from importlib.metadata import version

from grpo_lab.trainer.trl_bridge.environments import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.flex_mask import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.forwards import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.gradients import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.kept import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.names import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.names import refuse_untested
from grpo_lab.trainer.trl_bridge.shared_attention import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.values import *  # noqa: F403
from grpo_lab.trainer.trl_bridge.varlen import *  # noqa: F403

refuse_untested(version("trl"))
