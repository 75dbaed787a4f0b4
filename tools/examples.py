"""Runs every example in miniature, one after the other: `make examples ARGS='dpo distill'`.

A miniature is the example's own test: tiny models, few steps, the same files and commands as in a
user's hands. The end of its test's name says what it checks. A run that was stopped continues with
the names that are left: `make examples ARGS=dpo`.

| consumes | waits for | unblocked by |
|---|---|---|
| two cores, 3 GiB | one pytest process for each example | its end, or `LIMIT_S` |
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal.errors import did_you_mean

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200.0

_INTEGRATION = "tests/integration"
_OFFLINE = f"{_INTEGRATION}/test_offline_recipes.py"
_PAIRS = (
    f"{_OFFLINE}::test_pairs_when_learned_for_some_steps_then_heldout_loss_is_recorded_and_"
    "the_model_saved"
)
_AGENTS = f"{_INTEGRATION}/test_agent_recipes.py::test_agent_when_run_then_it_trains"
_LOOPS = "tests/e2e/test_recipe_loops.py"
_TURNS = "tests/e2e/test_turns_and_tools_recipes.py"
_SEEING = "tests/e2e/test_judged_and_seeing_recipes.py"

# Name of a file in examples/ -> its test.
MINIATURES = {
    "anthropic_agent": f"{_AGENTS}[anthropic_agent]",
    "arithmetic_models": f"{_LOOPS}::test_arithmetic_models_when_run_then_engine_and_trainer_agree_"
    "over_updates[qwen3_5]",
    "arithmetic_grpo": f"{_LOOPS}::test_prepare_batch_when_eta_is_given_then_staleness_reaches_it_"
    "and_no_more[2]",
    "clevr_count": f"{_SEEING}::test_clevr_count_when_run_then_servers_and_trainer_see_the_same_"
    "and_the_tower_learns",
    "code_rl": f"{_TURNS}::test_code_rl_when_run_then_exactly_what_passes_its_tests_has_a_reward",
    "distill": f"{_INTEGRATION}/test_distill_recipe.py::test_distill_when_run_and_resumed_then_the_"
    "student_nears_its_teacher[keys0]",
    "dpo": f"{_PAIRS}[dpo-keys0]",
    "eval_only": f"{_LOOPS}::test_eval_only_when_run_then_every_answer_is_kept_and_nothing_is_"
    "trained",
    "gsm8k_grpo": f"{_LOOPS}::test_gsm8k_when_run_with_a_tiny_model_then_trains_and_engine_and_"
    "trainer_agree",
    "gsm8k_sft": f"{_OFFLINE}::test_sft_when_run_then_the_loss_falls_and_transformers_reads_"
    "the_model",
    "guess_number": f"{_INTEGRATION}/test_environment_recipe.py::test_guess_number_when_run_then_"
    "each_guess_is_an_answer_of_one_trajectory",
    "lora_grpo": f"{_INTEGRATION}/test_lora_recipe.py::test_lora_grpo_when_run_then_servers_have_"
    "what_peft_merges[adapter]",
    "multi_turn_math": f"{_TURNS}::test_multi_turn_math_when_run_then_late_answers_are_discounted_"
    "and_feedback_is_not_trained",
    "on_policy_distill": f"{_SEEING}::test_on_policy_distill_when_the_teacher_is_served_then_its_"
    "steps_are_those_of_a_folder",
    "openai_agent": f"{_AGENTS}[openai_agent]",
    "openai_agents_sdk": f"{_AGENTS}[openai_agents_sdk]",
    "outside_agents": f"{_INTEGRATION}/test_online_recipe.py::test_outside_agents_when_they_play_"
    "beside_the_run_then_it_trains",
    "own_loss": f"{_LOOPS}::test_own_loss_when_run_in_miniature_then_its_numbers_are_in_the_rows",
    "ppo_critic": f"{_LOOPS}::test_ppo_critic_when_run_in_miniature_then_the_critic_warms_up_"
    "alone_and_resumes",
    "reasoning_gym": f"{_SEEING}::test_reasoning_gym_when_run_then_easy_questions_come_first",
    "reward_model": f"{_PAIRS}[reward_model-keys4]",
    "search_agent": f"{_TURNS}::test_search_agent_when_run_then_documents_are_read_and_not_trained",
    "tldr": f"{_SEEING}::test_tldr_when_run_then_answers_have_the_scores_of_the_reward_model",
    "tool_calculator": f"{_TURNS}::test_tool_calculator_when_run_then_results_are_context_and_only_"
    "right_ones_are_rewarded",
}


def checked(test: str) -> str:
    """What a test's name says it checks: the words after `_then_`."""
    return test.rsplit("_then_", maxsplit=1)[-1].split("[", maxsplit=1)[0].replace("_", " ")


def run(test: str) -> tuple[bool, float, str]:
    """Runs one test: whether it passed, seconds, what it printed."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, time.monotonic() - began, f"{test}: no end after {LIMIT_S:g} s"
    return done.returncode == 0, time.monotonic() - began, done.stdout


def main() -> int:
    """Runs those named, or all; 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="make examples", description="Runs examples in miniature."
    )
    parser.add_argument("names", nargs="*", help="of examples; none: all")
    names = parser.parse_args().names
    for name in names:
        if name not in MINIATURES:
            hint = did_you_mean(name, MINIATURES)
            parser.error(f"example {name!r}: expected one of {', '.join(MINIATURES)}{hint}")
    console = Console()
    table = Table("example", "checked", "result", "seconds")
    table.columns[-1].justify = "right"
    failed = []
    for name in names or MINIATURES:
        console.print(f"{name} …", highlight=False)
        passed, seconds, output = run(MINIATURES[name])
        if not passed:
            failed.append(name)
            print("\n".join(output.splitlines()[-40:]), flush=True)
        said = "[green]passed[/]" if passed else "[red]failed[/]"
        if passed and " skipped" in output:
            said = "[yellow]skipped: it needs a package that is not installed[/]"
        table.add_row(name, checked(MINIATURES[name]), said, f"{seconds:.0f}")
    console.print(table)
    if failed:
        console.print(f"Once more, those that failed: make examples ARGS='{' '.join(failed)}'")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
