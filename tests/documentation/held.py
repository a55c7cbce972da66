"""Which test runs what a page tells the reader to type; where none does, why.

Patterns as of the shell, the first that fits a command counts. ``file::test`` runs the command, or the function behind
it, on this machine with small numbers; ``("gpu", …)``, ``("network", …)``, ``("hours", …)``, ``("minutes", …)`` says
what it needs that a test has not.
"""

from __future__ import annotations

WHEEL = "tests/recipes/test_wheel.py::"
EVALUATE = "tests/training/test_evaluate.py::"
ROUNDS = "tests/training/test_rounds_run.py::"
COMPARING = "tests/training/test_comparing_scripts.py::"
KIT = "tests/unit/scripts/test_offline_kit.py::"
CLI = "tests/unit/recipe/test_cli.py::"
PIPELINE = "tests/training/test_pipeline_runner.py::test_"

HELD: dict[str, str | tuple[str, str]] = {
    # make
    "make train": f"{WHEEL}test_the_quick_start_runs_with_overrides",
    "make test": ("minutes", "is the suite that this test is part of; .ci/run calls it"),
    "make test-fast": ("minutes", "a part of that suite"),
    "make test-thorough": ("minutes", "what `make test` leaves out"),
    "make test-numeric": ("minutes", "a part of that suite, once for each kind of kernel"),
    "make test-versions": ("network", "fresh environments, some minutes each"),
    "make setup": ("network", "installs; `make test` begins with it"),
    "make setup-vllm": ("network", "installs; its parts: tests/rollouts/test_setup_vllm.py"),
    "make docs": "tests/documentation/test_site.py::test_the_site_is_built_without_a_warning",
    "make docs-serve": ("minutes", "serves until it is stopped"),
    "make gpu-check*": ("gpu", "its tiny form has a test of its own"),
    "make speedrun": "tests/training/test_speedrun.py::test_a_target_that_is_reached_at_once",
    "python scripts/speedrun.py *": "tests/training/test_speedrun.py::test_a_target_that_is_reached_at_once",
    "taskset -c 0 python scripts/speedrun.py *": (
        "tests/training/test_speedrun.py::test_a_target_that_is_reached_at_once"
    ),
    "make bench": ("minutes", "every benchmark in short: 13 minutes of both cores"),
    "make bench-*": ("minutes", "a benchmark: 20 minutes of both cores"),
    "python scripts/bench_checkouts.py *": ("minutes", "a benchmark of two checkouts: 10 minutes of a core"),
    "pip install *": ("network", "installs; the extras are looked up in pyproject.toml"),
    # grpo-lab
    "grpo-lab * --help": f"{WHEEL}test_everything_imports_and_help_is_there",
    "grpo-lab train * --use_vllm true*": "tests/rollouts/test_lab_trainer_vllm.py::test_eight_steps_with_a_proven_sync",
    "grpo-lab train --config recipes/turns/*": "tests/recipes/test_turns.py::test_two_steps",
    "grpo-lab train --config recipes/quickstart/*": f"{WHEEL}test_the_quick_start_runs_with_overrides",
    "grpo-lab quickstart*": f"{WHEEL}test_the_quick_start_runs_with_overrides",
    "grpo-lab curate --config *": (
        "tests/training/test_curate.py::test_a_killed_curation_goes_on_without_repeating_work"
    ),
    "grpo-lab pipeline resume *": f"{PIPELINE}what_depends_on_a_change_is_done_again_and_nothing_else",
    "grpo-lab pipeline status *": f"{PIPELINE}what_depends_on_a_change_is_done_again_and_nothing_else",
    "grpo-lab pipeline show *": f"{PIPELINE}what_depends_on_a_change_is_done_again_and_nothing_else",
    "grpo-lab pipeline run recipes/lab/prm/*": "tests/unit/labs/test_prm_lab.py::test_the_pipeline_in_short",
    "grpo-lab pipeline *": (
        "tests/training/test_pipeline_runner.py::test_a_kind_outside_the_package_is_run_by_a_yaml_of_the_docs"
    ),
    "grpo-lab rounds * --dry-run": (
        "tests/unit/runs/test_rounds.py::test_every_recipe_is_told_in_words_and_leaves_nothing_behind"
    ),
    "grpo-lab rounds *po_rounds.yaml*": f"{ROUNDS}test_pairs_by_rounds_and_more_rounds_than_were_asked_for",
    "grpo-lab rounds *": (
        f"{ROUNDS}test_accuracy_rises_and_a_kill_or_a_stop_in_each_part_of_the_second_round_changes_no_byte"
    ),
    "grpo-lab evaluate * --template *": f"{EVALUATE}test_budgets_modes_and_a_second_model_in_one_call",
    "grpo-lab evaluate * --like *": f"{EVALUATE}test_like_a_run_is_what_the_run_measured",
    "grpo-lab evaluate * --data word_problems *": f"{EVALUATE}test_rows_other_than_the_run_s_own_are_noted",
    "grpo-lab harness *": "tests/training/test_harness.py::test_the_folder_says_what_the_harness_would_do_otherwise",
    "grpo-lab evaluate * --data *": f"{EVALUATE}test_every_loader_argument_is_an_option_and_the_summary_says_all",
    "grpo-lab compare *": "tests/unit/evaluation/test_compare.py::test_two_whole_runs_and_a_lone_evaluation",
    "grpo-lab report *": (
        "tests/unit/reports/test_report_kinds.py::test_every_kind_has_its_page_and_report_writes_it_again"
    ),
    "grpo-lab lab kl": "tests/unit/labs/test_kl_lab.py::test_the_command_writes_table_and_figure_and_repeats_nothing",
    "grpo-lab lab overoptimisation": (
        "tests/unit/labs/test_overoptimisation_lab.py::test_the_command_runs_every_kind_of_arm_and_repeats_nothing"
    ),
    "grpo-lab lab search": (
        "tests/unit/labs/test_search_lab.py::test_the_command_runs_searches_and_views_and_repeats_nothing"
    ),
    "grpo-lab lab preference": f"{COMPARING}test_the_lab_of_a_preference_model_in_small",
    "grpo-lab lab capability --recipe *": (
        "tests/unit/labs/test_capability.py::test_the_lab_of_a_gpu_is_dry_run_without_one"
    ),
    "grpo-lab lab capability*": "tests/unit/labs/test_capability.py::test_a_cell_in_short",
    "grpo-lab lab *.yaml": f"{COMPARING}test_a_team_s_lab_by_its_path_as_a_module",
    "grpo-lab lab *": f"{COMPARING}test_every_lab_that_trains_in_small",
    "make labs": f"{COMPARING}test_every_lab_that_trains_in_small",
    "python scripts/lab_tables.py": "tests/unit/labs/test_lab_arms.py::test_a_table_takes_the_place_of_its_block",
    "grpo-lab check numerics *": ("tests/rollouts/test_check_numerics.py::test_bfloat16_against_float32_is_no_alarm"),
    "grpo-lab serve *": (
        "tests/rollouts/test_server.py::test_real_server_takes_weights_and_answers_with_the_trainer_s_policy"
    ),
    # launchers and scripts
    "accelerate launch *": "tests/distributed/test_real_run.py::test_trains_for_real",
    "sbatch *": "tests/recipes/test_launch_files.py::test_two_train_and_one_serves",
    "python scripts/turns_through_templates.py": "tests/unit/turns/test_dialogue.py::test_turns_go_through_templates",
    "python scripts/check_upstream.py *": "tests/unit/scripts/test_check_upstream.py::test_what_moved_is_named",
    "python scripts/simulate_balance.py*": (
        "tests/unit/update/test_update_plan_simulation.py::test_ranks_are_even_on_real_lengths"
    ),
    "python scripts/memory_table.py": (
        "tests/unit/scripts/test_memory_table.py::test_the_docs_hold_what_the_script_prints"
    ),
    "python -m tests.reference.test_language_data": "tests/reference/test_language_data.py::test_every_ordered_pair",
    "python scripts/gpu_check.py*": ("gpu", "its tiny form has a test of its own"),
    "bash scripts/gpu_lent.sh *": "tests/training/test_gpu_lent.py::test_two_calls_unpack_vllm_whole_or_not_at_all",
    "python3 KIT/unpack.py *": f"{KIT}test_unpacked_it_says_what_imports_and_names_all_that_is_missing",
    "python scripts/offline_kit.py *": ("network", "downloads; all else of it: tests/unit/scripts/test_offline_kit.py"),
    "make stress-kill": (
        "tests/stress/test_kill_anywhere.py::test_a_run_killed_three_times_is_the_uninterrupted_one_to_the_bit"
    ),
    "make stress-kill-commands": ("minutes", "fifty kills of five commands"),
    "make stress-hostile": "tests/stress/test_hostile_text.py::test_every_reward_survives_every_family",
    "make stress-soak": "tests/stress/test_soak.py::test_a_short_run_holds_what_it_holds",
    "make stress-guards": (
        "tests/stress/test_mutate_guards.py::test_a_held_guard_and_a_loose_one_are_told_apart_and_run_once"
    ),
    "make docs-index": "tests/documentation/test_generated.py::test_it_is_what_its_generator_makes",
    "make lab-smoke": f"{COMPARING}test_smoke_of_two_presets",
    "python recipes/lab/sorting/sources.py*": (
        "tests/unit/labs/test_sorting_sources.py::test_the_sources_sorting_run_begins_at_chance_and_learns"
    ),
    "grpo-lab train --config recipes/lab/*": (
        "minutes",
        "an experiment; its recipe is dry-run by tests/recipes/test_recipes.py",
    ),
    **{
        f"grpo-lab train --config recipes/{recipe}.yaml": (
            "minutes",
            "the same command with another recipe, which tests/recipes/test_recipes.py dry-runs",
        )
        for recipe in ("verifiable/*", "kimi/quickstart", "r1/quickstart")
    },
}
