"""``python -m benchmarks pipeline``: chats through our text-generation pipeline and through transformers' own.

Both get the same list in one call and the same options, so answers end where the model ends them: what a static batch
does with rows that are done, and with prompts of unequal length, is part of what is measured. Runs are fresh processes
on the same cores, in turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.contenders import Contender
from benchmarks.compare.harness import RunResult, Settings, ask, one_line
from benchmarks.compare.measures import Benchmark, Column
from paged_backend.bench.perplexity import default_text
from paged_backend.bench.workloads import PROMPTS, BenchRequest, draw_lengths

Chat = list[dict[str, str]]

QUESTIONS = (
    "Answer yes or no: is this text about programming?",
    "Name the three most important words of this text.",
    "Summarise this text in one sentence.",
    "Explain this text to a child.",
    "What is the title of this text?",
    "Write a short story in which this text is read aloud.",
    "List everything that this text asks of its reader.",
    "Reply to the author of this text with a friendly letter.",
)

PIPELINE = Benchmark(
    "pipeline",
    lambda run: {"tokens_per_s": run.tokens_per_s, "wall_s": run.wall_s},
    (
        Column("tokens_per_s", "tok/s", plot=True),
        Column("wall_s", "seconds"),
        Column("tokens_per_cpu_s", "tok/cpu s"),
        Column("cpu_share", "cpu share", "{:.0%}"),
        Column("load_s", "load s"),
        Column("peak_rss_mb", "peak MB", "{:.0f}", plot=True),
    ),
    "tokens_per_s",
)


def chats(count: int, seed: int = 0, words: str | None = None) -> list[Chat]:
    """``count`` chats of one question about an excerpt each, as long as chats are (see ``workloads.PROMPTS``).

    The same for every model: lengths are drawn in words of four letters and a space, about a token each.
    """
    if count < 1:
        raise ValueError(f"requests must be at least 1, got {count}")
    text = " ".join((default_text() if words is None else words).split())
    rng = random.Random(seed)
    made = []
    for number, length in enumerate(draw_lengths(PROMPTS, count, rng)):
        question = QUESTIONS[number % len(QUESTIONS)]
        letters = max(20, 4 * length - len(question))
        start = rng.randrange(max(1, len(text) - letters))
        made.append([{"role": "user", "content": f"{question}\n\n{text[start : start + letters]}"}])
    return made


def run_once(prompts: Sequence[Any], contender: Contender, model: str, settings: Settings) -> RunResult:
    """One run in a fresh process; what fails is a result with its reason. prompts: chats, or all of them texts."""
    try:
        request: Mapping[str, Any] = {
            "model": model,
            "options": dict(contender.options),
            "cores": list(settings.cores),
            "threads": settings.threads,
            "max_seqs": len(prompts),
            "one_by_one": False,
            "warmup": [{"prompt": prompt} for prompt in prompts[:2]],
            "requests": [{"prompt": prompt} for prompt in prompts],
        }
        answer = ask(contender, request, settings.timeout)
        tokens = [item["tokens"] for item in answer["requests"]]
        return RunResult(
            contender.label,
            wall_s=answer["wall_s"],
            cpu_s=answer["cpu_s"],
            load_s=answer["load_s"],
            peak_rss_mb=answer.get("peak_rss_mb"),
            loaded_rss_mb=answer.get("loaded_rss_mb"),
            requests=tuple(BenchRequest((), len(new)) for new in tokens),
            tokens=tokens,
            times=[None] * len(tokens),
            versions=answer.get("versions", {}),
        )
    except Exception as error:  # one side's trouble is a line of the table, not the end of the benchmark
        return RunResult(contender.label, error=one_line(error))


def same_answers(results: Mapping[str, Sequence[RunResult]], baseline: str | None) -> list[str]:
    """A line for each side: in how many answers every token is the baseline's."""
    if baseline is None:
        return []
    theirs = results[baseline][0].tokens
    lines = []
    for label, runs in results.items():
        if label != baseline and runs and runs[0].error is None:
            same = sum(list(a) == list(b) for a, b in zip(runs[0].tokens, theirs))
            lines.append(f"{label}: {same} of {len(theirs)} answers are {baseline}'s, token for token")
    return lines
