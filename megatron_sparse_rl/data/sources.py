"""The two sources of a run: training prompts in endless order, held-out prompts as a list.

In: `DataSettings` and a tokenizer. Out: a `PromptSource` and the held-out `Prompt`s, with no question in
both. A problem that is in both belongs to the held-out set, so that what is measured stays the same however
the training set grows.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_sparse_rl.data.problems import Problem, load_problems
from megatron_sparse_rl.data.prompts import PromptSource, all_overlong, check_rendering, make_prompt
from megatron_sparse_rl.data.settings import DataSettings, SourceSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Prompt

logger = logging.getLogger(__name__)


def build_sources(
    settings: DataSettings, tokenizer: Any, *, max_prompt_tokens: int, seed: int
) -> tuple[PromptSource, list[Prompt]]:
    """The training source and the held-out prompts (empty when `data.eval` names neither path nor task).

    Held-out problems are indexed from 0, repeated and over-long ones left out. Raises SettingError, starting
    with `data.train` or `data.eval`, for what `load_problems` and `render` refuse, when all prompts of a set
    are too long, and when the held-out questions leave no training problem.
    """
    with _blame("data.train"):
        train = load_problems(settings.train)
    held_out: list[Problem] = []
    if settings.eval.path or settings.eval.task:
        with _blame("data.eval"):
            held_out = _distinct(load_problems(settings.eval))
    train = _without(train, held_out)
    with _blame("data.train"):
        source = PromptSource(
            train,
            settings.train,
            tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            shuffle=settings.shuffle,
            epochs=settings.epochs,
            seed=seed,
        )
    with _blame("data.eval"):
        prompts = _held_out_prompts(held_out, settings.eval, tokenizer, max_prompt_tokens)
    logger.info("data: %d training problems, %d held-out prompts", len(source), len(prompts))
    return source, prompts


def _distinct(problems: list[Problem]) -> list[Problem]:
    """The first of each question."""
    first = {problem.question: problem for problem in reversed(problems)}
    kept = [problem for problem in problems if first[problem.question] is problem]
    if len(kept) < len(problems):
        logger.info(
            "data.eval: left out %d repeated questions of %d", len(problems) - len(kept), len(problems)
        )
    return kept


def _without(train: list[Problem], held_out: list[Problem]) -> list[Problem]:
    """The training problems whose question is not held out."""
    questions = {problem.question for problem in held_out}
    kept = [problem for problem in train if problem.question not in questions]
    if not kept:
        raise SettingError(
            f"data.eval holds out {len(questions)} questions, among them every one of the {len(train)} "
            "training problems, so nothing is left to learn from; lower data.eval.size, or widen data.train"
        )
    if len(kept) < len(train):
        logger.info("data.train: removed %d held-out problems of %d", len(train) - len(kept), len(train))
    return kept


def _held_out_prompts(
    problems: list[Problem], settings: SourceSettings, tokenizer: Any, max_prompt_tokens: int
) -> list[Prompt]:
    if problems:
        check_rendering(problems[0], settings, tokenizer)
    prompts: list[Prompt] = []
    for problem in problems:
        prompt = make_prompt(len(prompts), problem, settings, tokenizer)
        if len(prompt.token_ids) <= max_prompt_tokens:
            prompts.append(prompt)
    if problems and not prompts:
        raise all_overlong(len(problems), max_prompt_tokens)
    if len(prompts) < len(problems):
        logger.info(
            "data.eval: left out %d prompts of more than %d tokens",
            len(problems) - len(prompts),
            max_prompt_tokens,
        )
    return prompts


@contextmanager
def _blame(section: str) -> Iterator[None]:
    """Put the section's name before a SettingError's sentence."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{section}: {error}") from None
