"""Settings that cannot be combined, one row each: (condition, the message that names them).

``LabConfig.agree`` checks ``BEFORE`` (and ``AHEAD``, ``TURNS``, ``tasks.CONFLICTS``) on the settings as written, and
``AFTER`` once it has built the algorithm that they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_lab.engines.vllm.sampling_keys import refuse_ends, refuse_keys, refuse_two_names
from grpo_lab.settings import from_json
from grpo_lab.trainer.settings.advantage_conflicts import OF_RULES
from grpo_lab.trainer.settings.limits import NOT_TRLS
from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.settings.sampling_conflicts import OF_SAMPLING


@dataclass(frozen=True)
class Case:
    """The settings that the conditions of conflicts look at.

    Attributes:
        args: the configuration, with TRL's fields.
        ours: our settings in it, parsed.
        algorithm: the algorithm that they make; ``None`` for ``BEFORE``.
    """

    args: Any
    ours: LabSettings
    algorithm: Any = None

    def of_rollout(self, *names: str) -> str | None:
        """Return the first of ``names`` that the user wrote in ``rollout``; else None."""
        return _first(names, from_json(self.args.rollout, "rollout"))

    @property
    def thinks(self) -> bool:
        return self.ours.rollout.thinking_budget is not None

    @property
    def ahead(self) -> str | None:
        """``overlap`` or ``cut_after``, whichever lets the run train on completions of an earlier policy; else None."""
        return self.ours.rollout.earlier_policy

    @property
    def corrects(self) -> bool:
        """Whether TRL's setting asks for a correction by the engine's log-probs."""
        return bool(self.args.use_vllm and self.args.vllm_importance_sampling_correction)

    @property
    def half(self) -> str | None:
        """``bf16`` or ``fp16``, whichever is set; else None."""
        return next((name for name in ("bf16", "fp16") if getattr(self.args, name)), None)

    @property
    def updates(self) -> float:
        """Number of optimizer steps on one generation batch."""
        return float(self.args.steps_per_generation * self.args.num_iterations / self.args.gradient_accumulation_steps)

    @property
    def fresh_reference(self) -> bool:
        """Whether ``reference_every`` makes the reference equal to the policy whenever a batch is generated."""
        every = self.args.reference_every
        if not isinstance(every, int):
            return every is not None
        if self.updates < 1:
            return every == 1
        return self.updates % every == 0


#: (condition, message). There is a conflict if the condition returns something else than None and False. The message is
#: a format string; ``found`` in it is what the condition returned, ``case`` the ``Case``, further names are its fields.
Conflict = tuple[Callable[[Case], Any], str]


def refuse(rows: Iterable[Conflict], case: Case) -> None:
    """Raise ValueError with the message of the first row whose condition holds."""
    for when, sentence in rows:
        found = when(case)
        if found is not None and found is not False:
            raise ValueError(sentence.format(**vars(case), case=case, found=found))


def _first(names: Iterable[str], among: Any) -> str | None:
    """Return the first of ``names`` that is a key of ``among`` (a mapping or None); else None."""
    return next((name for name in names if name in (among or ())), None)


_PHASE = (
    "max_tokens",
    "max_new_tokens",
    "max_length",
    "stop_strings",
    "stop",
    "stop_token_ids",
    "n",
    "repetition_detection",
    "max_time",
)
"""Sampling settings of transformers or vLLM that would end a phase of thinking or answering, or a segment of a
completion."""
#: Conflicts of both ``rollout.overlap`` and ``rollout.cut_after``.
EARLIER_POLICY: tuple[Conflict, ...] = (
    (
        lambda c: not c.args.vllm_importance_sampling_correction,
        "`rollout.{case.ahead}` trains on completions of an earlier policy, and "
        "`vllm_importance_sampling_correction: false` would weigh them as if they were the policy's: leave that out, "
        "or `{case.ahead}`",
    ),
    (
        lambda c: c.args.vllm_importance_sampling_mode == "sequence_mask",
        "`vllm_importance_sampling_mode: sequence_mask` does not combine with `rollout.{case.ahead}`: its ratio is a "
        "product over the completion, so under an earlier policy it passes its bound the sooner the longer the "
        "completion is, and long ones would not be trained on. Use 'token_truncate' (the default with "
        "`{case.ahead}`) or 'token_mask', or 'sequence_truncate' for an objective about whole responses",
    ),
)

OVERLAP: tuple[Conflict, ...] = (
    (
        lambda c: not c.args.use_vllm,
        "`rollout.overlap` generates beside the training, and without `use_vllm` the completions come from the model "
        "in training, which cannot do both: start `grpo-lab serve`, set `use_vllm: true` and `vllm_mode: server`, or "
        "leave `overlap` out",
    ),
    (
        lambda c: c.args.vllm_mode != "server",
        "`rollout.overlap` generates beside the training, and with `vllm_mode: "
        "{args.vllm_mode}` the engine shares the trainer's process and device, so neither would be faster: start "
        "`grpo-lab serve` and set `vllm_mode: server`, or leave `overlap` out",
    ),
    *EARLIER_POLICY,
    (
        lambda c: c.thinks,
        "`rollout.thinking_budget` asks the engine up to three times for one completion, and `rollout.overlap` has the "
        "next batch in the engine meanwhile: leave one of them out",
    ),
    (
        lambda c: c.ours.update.dead_groups == "resample",
        "`update.dead_groups: resample` asks for further prompts once rewards are known, and `rollout.overlap` has the "
        "next batch in the engine by then: leave one of them out",
    ),
    (
        lambda c: c.ours.sampler is not None,
        "`sampler`={ours.sampler.name!r} draws a round when it is asked for, and `rollout.overlap` asks one generation "
        "batch early, before the results that it is to be drawn by: leave one of them out",
    ),
)

CUT_AFTER: tuple[Conflict, ...] = (
    (
        lambda c: not c.args.use_vllm,
        "`rollout.cut_after` trains on completions of several policies, which takes the log-probs that each token was "
        "sampled with, and without `use_vllm` transformers' `generate` hands out none: set `use_vllm: true`, or leave "
        "`cut_after` out",
    ),
    (
        lambda c: c.ours.rollout.overlap > 0,
        "`rollout.overlap` asks for the whole of one generation batch early, and with `rollout.cut_after` a batch is "
        "what is whole once the engine has answered: leave one of them out",
    ),
    *EARLIER_POLICY,
    (
        lambda c: c.args.max_completion_length is None,
        "`rollout.cut_after` needs `max_completion_length`, at which a completion ends over all its segments: set it",
    ),
    (
        lambda c: c.ours.rollout.cut_after >= c.args.max_completion_length,
        "`rollout.cut_after` is {ours.rollout.cut_after} and `max_completion_length` is {args.max_completion_length}, "
        "so no completion would ever be put aside: lower it, or leave it out",
    ),
    (
        lambda c: c.thinks,
        "`rollout.thinking_budget` ends the thinking of a completion in calls of its own, and `rollout.cut_after` puts "
        "it aside in between: leave one of them out",
    ),
    (
        lambda c: c.ours.update.dead_groups == "resample",
        "`update.dead_groups: resample` fills a batch with further prompts once rewards are known, and with "
        "`rollout.cut_after` it is filled with what is whole: leave one of them out",
    ),
    (
        lambda c: c.ours.sampler is not None,
        "`sampler`={ours.sampler.name!r} draws a round by the results of the one before, and `rollout.cut_after` "
        "begins rounds before those are known: leave one of them out",
    ),
    (
        lambda c: _first(_PHASE, c.args.generation_kwargs),
        "`generation_kwargs.{found}` would end a completion where `rollout.cut_after` cannot tell that from the end of "
        "a segment; leave one of them out (`max_completion_length` is the limit of a whole completion)",
    ),
)

AHEAD: dict[str | None, tuple[Conflict, ...]] = {None: (), "overlap": OVERLAP, "cut_after": CUT_AFTER}
"""Conflicts that are checked if ``rollout.overlap`` or ``rollout.cut_after`` is set, by that name (``Case.ahead``)."""

BEFORE: tuple[Conflict, ...] = (
    (
        lambda c: not c.args.use_vllm and c.of_rollout("verify_every", "sync", "tolerance", "engine", "server"),
        "`rollout.{found}` has an effect only with `use_vllm: true`; leave it out or switch vLLM on",
    ),
    (
        lambda c: c.args.use_vllm and c.of_rollout("generate"),
        "`rollout.generate` has no effect with `use_vllm: true`, where the engine generates; leave it out",
    ),
    (
        lambda c: c.args.vllm_mode != "server" and c.of_rollout("server"),
        "`rollout.server` has an effect only with `vllm_mode: server`, and it is {args.vllm_mode!r}: leave it out",
    ),
    (
        lambda c: c.args.vllm_mode == "server" and c.of_rollout("engine"),
        "`rollout.engine` has no effect with `vllm_mode: server`: give these options to `grpo-lab serve` (--dtype, …)",
    ),
    (
        lambda c: c.ours.rollout.sync == "adapter" and c.ours.rollout.server.weights == "nccl",
        "`rollout.sync: adapter` sends files, and `rollout.server.weights` is 'nccl': leave one of them out",
    ),
    (
        lambda c: c.ours.rollout.sync == "adapter" and c.args.vllm_enable_sleep_mode,
        "`rollout.sync: adapter` sends no base weights, and `vllm_enable_sleep_mode` drops the engine's: leave one out",
    ),
    (
        lambda c: c.thinks and c.args.max_completion_length is None,
        "`rollout.thinking_budget` needs `max_completion_length`, of which the rest is the answer's: set it",
    ),
    (
        lambda c: c.thinks and c.ours.rollout.thinking_budget >= c.args.max_completion_length,
        "`rollout.thinking_budget` is {ours.rollout.thinking_budget} and `max_completion_length` is "
        "{args.max_completion_length}: the budget, the inserted text and an answer must fit; change one of them",
    ),
    (
        lambda c: c.thinks and c.args.vllm_structured_outputs_regex,
        "`vllm_structured_outputs_regex` would have to match the thinking and the answer each on its own under "
        "`rollout.thinking_budget`; leave one of them out",
    ),
    (
        lambda c: c.thinks and _first(_PHASE, c.args.generation_kwargs),
        "`generation_kwargs.{found}` would end the thinking or the answer where `rollout.thinking_budget` cannot see "
        "it; leave one of them out (`max_completion_length` is the limit of a whole completion)",
    ),
    (
        lambda c: c.ours.sampler is not None and not c.args.shuffle_dataset,
        "`shuffle_dataset`=False and `sampler`={ours.sampler.name!r} ask for different orders: leave one out",
    ),
    (
        lambda c: c.ours.sampler is not None and c.args.ignore_data_skip,
        "`ignore_data_skip`=True would resume with other prompts than `sampler`, which replays: leave one out",
    ),
    (
        lambda c: c.ours.objective is None and c.args.loss_type.startswith(NOT_TRLS),
        "`loss_type`={args.loss_type!r} is what a run with `objective` wrote there, and TRL has no such loss: set "
        "`objective` as in that run, or a `loss_type` of TRL's",
    ),
    (
        lambda c: c.ours.kl and c.ours.kl.coefficient is not None and c.args.beta not in (0.0, c.ours.kl.coefficient),
        "`kl.coefficient` is {ours.kl.coefficient} and `beta` is {args.beta}: two names for one number; set one",
    ),
    (
        lambda c: c.args.use_transformers_continuous_batching and not c.args.use_vllm and c.half,
        "`use_transformers_continuous_batching` with `{found}`: for its first generation TRL casts the model itself to "
        "{found}, rotary frequencies too, and leaves it so, whatever it was loaded in: small steps are lost from then "
        "on. Set `{found}: false`, or generate with `use_vllm`, or leave `use_transformers_continuous_batching` out",
    ),
    *OF_SAMPLING,
)

TURNS: tuple[Conflict, ...] = (
    (
        lambda c: c.args.max_completion_length is None,
        "`rollout.turns` needs `max_completion_length`, at which a trajectory ends over all its turns: set it",
    ),
    (
        lambda c: c.args.use_vllm and c.args.vllm_mode == "colocate" and c.args.vllm_tensor_parallel_size > 1,
        "`rollout.turns` does not combine with `vllm_tensor_parallel_size` {args.vllm_tensor_parallel_size}: an engine "
        "over several ranks takes the same step on each, and their trajectories have turns of their own; use "
        "`vllm_mode: server`, or leave one of them out",
    ),
    (
        lambda c: c.ours.rollout.turns.max_turns and c.args.max_tool_calling_iterations is not None,
        "`rollout.turns.max_turns` is {ours.rollout.turns.max_turns} and `max_tool_calling_iterations` is "
        "{args.max_tool_calling_iterations}: two names for one number (it counts one less); set one",
    ),
)
"""Conflicts that are checked if ``rollout.turns`` is set."""

AFTER: tuple[Conflict, ...] = (
    *OF_RULES,
    (
        lambda c: getattr(c.algorithm.value, "missing_eos_penalty", None) and c.args.mask_truncated_completions,
        "`value.missing_eos_penalty` has no effect with `mask_truncated_completions`, on the same rows; leave one out",
    ),
    (
        lambda c: c.algorithm.value is not None and c.ours.kl is not None and c.ours.kl.gamma is not None,
        "`kl.gamma` has no effect with a critic, whose discount is for all rewards: leave it out; set `value.gamma`",
    ),
    (
        lambda c: c.ours.kl is not None and c.algorithm.objective is None,
        "`kl` is set, but the loss is left to TRL ({algorithm.left_to_trl}), which has a KL of its own; use `beta`",
    ),
    (
        lambda c: c.ours.token_weights_every is not None and c.algorithm.objective is None,
        "`token_weights_every` is set, but the loss is left to TRL ({algorithm.left_to_trl}), and TRL's hands out no "
        "log-probs to differentiate it by: set `objective`, or leave it out",
    ),
    (
        lambda c: c.args.reference_every is not None and c.args.beta == 0.0,
        "`reference_every` is {args.reference_every!r}, but nothing reads a reference (`beta` is 0 and `kl` is not "
        "set): set one of them, or leave it out",
    ),
    (
        lambda c: c.args.reference_every is not None and c.args.sync_ref_model,
        "`reference_every`={args.reference_every!r} and `sync_ref_model` both move the reference (TRL's with "
        "`ref_model_mixup_alpha`={args.ref_model_mixup_alpha}): leave one out",
    ),
    (
        lambda c: c.fresh_reference and c.ours.kl is not None and c.ours.kl.placement == "reward",
        "`reference_every`={args.reference_every!r} makes the reference the policy that generates ({case.updates:g} "
        "updates a generation batch), so a KL in the reward is always 0: raise `reference_every`, or put the KL in the "
        "loss (`kl.placement: loss`)",
    ),
    (
        lambda c: c.fresh_reference and c.updates <= 1,
        "`reference_every`={args.reference_every!r} has no effect but to switch the KL off: a generation batch gets "
        "{case.updates:g} updates, and the reference is the policy; raise it, `steps_per_generation` or "
        "`num_iterations`",
    ),
)


def refuse_sampling_keys(args: Any) -> None:
    """Raise ValueError for a key of ``generation_kwargs`` that the engine ignores, that contradicts a setting, or that
    makes TRL mask complete completions, since it takes them for truncated ones."""
    extra = args.generation_kwargs or {}
    refuse_keys(extra, args.vllm_mode if args.use_vllm else "transformers")
    alike = {"temperature": args.temperature}
    if args.use_vllm or args.objective is not None:  # without either, all that counts is TRL's
        alike["max_completion_length"] = args.max_completion_length
    refuse_two_names(extra, alike)
    if args.mask_truncated_completions:
        refuse_ends(extra)
