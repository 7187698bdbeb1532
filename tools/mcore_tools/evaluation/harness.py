# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine as a model of lm-evaluation-harness, which the extra ``eval`` brings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from mcore_inference import SamplingParams
from mcore_tools.evaluation._choices import split
from mcore_tools.evaluation._perplexity import score_texts
from mcore_tools.evaluation._scorer import REMEDY, Scorer

_MAX_TOKENS = 256
"""Of a continuation, where a task says nothing; half of the engine's length where that is less."""
_KNOWN = frozenset({"until", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k"})


class EngineLM(LM):
    """Answers the harness's three kinds of requests.

    Args:
        scorer: of the model.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Of (context, continuation): the log-probability, and whether it is what greedy decoding gives."""
        pairs = [split(self.scorer, *request.args) for request in requests]
        sums = [sum(values) for values in self.scorer.log_probs(pairs)]
        greedy = self.scorer.continuations([context for context, _ in pairs], [len(text) for _, text in pairs])
        return [(value, tokens == text) for value, tokens, (_, text) in zip(sums, greedy, pairs, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Of whole texts."""
        return [-score_texts(self.scorer, [request.args[0]]).nats for request in requests]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuations up to a stop word; of a prompt that does not fit before one of full length the beginning is left out.

        Raises:
            ValueError: a setting of generation that is not known, or that leaves a prompt no room; or a prompt that the engine refuses.
        """
        prompts, params = zip(*(self._generation(*request.args) for request in requests), strict=True)
        records = self.scorer.engine.generate(prompts, params)
        if refused := [record.error for record in records if record.error is not None]:
            raise ValueError(f"the engine refused {len(refused)} prompts: {refused[0]}; {REMEDY}")
        return [record.generated_text for record in records]

    def _generation(self, context: str, settings: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        if unknown := sorted(set(settings) - _KNOWN):
            raise ValueError(f"generation_kwargs {unknown} are not known; {', '.join(sorted(_KNOWN))} are")
        longest, length = self.scorer.max_length, settings.get("max_gen_toks")
        length = min(_MAX_TOKENS, longest // 2) if length is None else int(length)
        if length >= longest:
            raise ValueError(f"max_gen_toks={length} leaves no room for a prompt within {longest} tokens; raise --max-length, or lower it")
        until = settings.get("until") or ()
        params = SamplingParams(
            temperature=float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0,
            top_p=float(settings.get("top_p") or 0.0),
            top_k=int(settings.get("top_k") or 0),
            num_tokens_to_generate=length,
            stop_words=(until,) if isinstance(until, str) else tuple(until),
        )
        tokens = [self.scorer.first, *self.scorer.tokenizer.tokenize(context)]
        return tokens[-(longest - length) :], params


class Tasks:
    """Tasks of the harness.

    Args:
        names: of the tasks.
        include: a folder with tasks of one's own.

    Raises:
        ValueError: no such task.
    """

    def __init__(self, names: Sequence[str], *, include: Path | None = None) -> None:
        path = None if include is None else str(include)
        manager = TaskManager(include_path=path, include_defaults=False)
        # The harness reads the files of thousands of tasks to find its own.
        if not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=path)
        if unknown := [task for task in names if task not in manager.all_tasks]:
            raise ValueError(f"lm-evaluation-harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists them, --include adds a folder")
        self._names, self._manager = names, manager

    def run(self, scorer: Scorer, *, limit: int | None = None, log: Callable[[str], None] = print) -> dict[str, dict[str, float]]:
        """Metrics of each task.

        Args:
            scorer: of the model.
            limit: questions of each task; None for all.
            log: called with a line before the tasks run.
        """
        log(f"{', '.join(self._names)}{'' if limit is None else f', {limit} questions each'}")
        model = EngineLM(scorer)
        results: Any = simple_evaluate(model=model, tasks=list(self._names), task_manager=self._manager, limit=limit, bootstrap_iters=0)
        return {
            task: {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, int | float)}
            for task, values in results["results"].items()
        }
