"""ScriptedRunner: stands in for a model where a test wants the real scheduler, cache and text path without floats.

Its "KV cache" stores token ids in the very slots the engine names, and the next token is a function of what it
reads back through the block table. A wrong slot, a stale prefix, a missed copy or a block freed too early
therefore changes the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.core import EngineCore
from paged_backend.engine.scheduler import Scheduler
from paged_backend.runner.base import Result, Runner, ScheduledSequence
from paged_backend.runner.sampler import Sampled, SampleRow, only_truncates

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.text.tokenizer import Tokenizer

NextToken = Callable[[list[int]], int]
POISON = -1


def mixing_next_token(vocab_size: int) -> NextToken:
    """A next-token function that depends on every token of the context and on its order."""

    def next_token(context: list[int]) -> int:
        state = 17
        for token in context:
            state = (state * 31 + token + 7) % 1_000_003
        return state % vocab_size

    return next_token


class ScriptedRunner(Runner):
    """next_token: called with a sequence's whole context as read from the cache. window: as in the cache manager."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = 1000,
        next_token: NextToken | None = None,
        window: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.window = window
        self.next_token = next_token or mixing_next_token(vocab_size)
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.num_runs = 0
        self.before_run: Callable[[Sequence[ScheduledSequence]], None] = lambda scheduled: None
        """Fault injection: called with each run's sequences before anything is written."""

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[Result]:
        self.num_runs += 1
        self.before_run(scheduled)
        for sequence in scheduled:
            for offset, token in enumerate(sequence.token_ids):
                block, slot = divmod(sequence.start + offset, self.block_size)
                if sequence.block_ids[block] == 0:
                    raise AssertionError("the engine asked to write to the null block")
                self.memory[sequence.block_ids[block]][slot] = token
        return [self._result(sequence) for sequence in scheduled]

    def _result(self, sequence: ScheduledSequence) -> Result:
        sampled: list[Sampled | Exception] = []
        for row in sequence.rows:
            context = self._read(sequence)
            if row.candidates:
                sampled.append(self._proposal(context, row.candidates))
                continue
            token = (self.next_token(context) + (row.seed if row.params.temperature else 0)) % self.vocab_size
            if row.constraint is not None:
                token = row.constraint.settle(token)
            sampled.append(Sampled(token, -1.0, 1, None))
        scores = [Sampled(token, -float(token), 1, []) for token in sequence.scored_ids]
        return Result(sampled, scores)

    def _proposal(self, context: list[int], count: int) -> Sampled:
        """Continuations of a beam: the ids from the next token on, as likely as the whole context has it."""
        first = self.next_token(context)
        scores = sorted((-float((first * 7 + i * i * 13) % 41) / 8 for i in range(count)), reverse=True)
        top = [((first + i) % self.vocab_size, score, i + 1) for i, score in enumerate(scores)]
        return Sampled(top[0][0], top=top)

    def _read(self, sequence: ScheduledSequence) -> list[int]:
        """The context that its last token sees."""
        end = sequence.end
        first = 0 if self.window is None else max(end - self.window, 0)
        context = []
        for position in range(first, end):
            block, slot = divmod(position, self.block_size)
            token = self.memory[sequence.block_ids[block]][slot]
            if token == POISON:
                raise AssertionError(f"position {position} was read before it was written")
            context.append(token)
        return context

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.memory[destination] = list(self.memory[source])

    def give_back(self, blocks: Sequence[int]) -> bool:
        for block in blocks:
            self.memory[block] = [POISON] * self.block_size
        return True


def scripted_core(
    num_blocks: int = 64,
    block_size: int = 16,
    *,
    runner: ScriptedRunner | None = None,
    next_token: NextToken | None = None,
    vocab_size: int = 1000,
    window: int | None = None,
    prefix_caching: bool = True,
    max_model_len: int = 4096,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    always_check: bool = True,
    ahead: bool = False,
) -> EngineCore:
    """An :class:`EngineCore` over a scripted runner, checking every invariant after every step. ahead: over one that
    takes the next step before it has computed this one."""
    kind = AheadRunner if ahead else ScriptedRunner
    runner = runner or kind(num_blocks, block_size, vocab_size, next_token, window)
    cache = CacheManager(num_blocks, block_size, window, prefix_caching)
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return EngineCore(runner, cache, scheduler, max_model_len, always_check)


class AheadRunner(ScriptedRunner):
    """Computes as late as it may, in the order in which it was asked, like a device with a queue.

    So whatever the engine does between launching a step and asking for its results happens before the step is computed,
    and stand-ins for tokens become what the step before has drawn.
    """

    runs_ahead = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue: list[Callable[[], object]] = []
        self._drawn: list[Sampled | Exception] = []

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[Result]:
        return self.launch(scheduled)()

    def launch(self, scheduled: Sequence[ScheduledSequence]) -> Callable[[], list[Result]]:
        outcome: list[list[Result] | Exception] = []

        def compute() -> None:
            try:
                drawn, self._drawn = self._drawn, []
                known = [replace(s, token_ids=[_known(t, drawn) for t in s.token_ids]) for s in scheduled]
                results = super(AheadRunner, self).run(known)
                self._drawn = [sampled for result in results for sampled in result.sampled]
                outcome.append(results)
            except Exception as error:
                outcome.append(error)

        def results() -> list[Result]:
            while not outcome:
                self._queue.pop(0)()
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        self._queue.append(compute)
        return results

    def draws_alone(self, row: SampleRow) -> bool:
        return only_truncates(row)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._queue.append(lambda: super(AheadRunner, self).copy_blocks(pairs))

    def give_back(self, blocks: Sequence[int]) -> bool:
        self._queue.append(lambda: super(AheadRunner, self).give_back(blocks))
        return True


class StepGate:
    """Holds an engine before each step, for tests that act while a request runs.

    No sleep is sure to be short or long enough for that. As a context manager it opens and goes at the end, so that a
    test that fails leaves no engine waiting.
    """

    def __init__(self, runner: Runner) -> None:
        self._lock = threading.Condition()
        self._allowed = 0
        self._is_open = False
        self._is_held = False
        # a scripted one may compute later than it is asked to
        self._place = runner, "before_run" if isinstance(runner, ScriptedRunner) else "run"
        self._behind = getattr(*self._place)
        setattr(*self._place, self._pass)

    def _pass(self, scheduled: Sequence[ScheduledSequence]) -> Any:
        with self._lock:
            self._is_held = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._is_open or self._allowed)
            self._allowed -= not self._is_open
            self._is_held = False
        return self._behind(scheduled)

    def wait_until_held(self, timeout: float = 20.0) -> None:
        """Until a step waits that has no leave; ``TimeoutError`` after ``timeout`` seconds."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._is_held and not self._allowed, timeout):
                raise TimeoutError("the engine took no step")

    def allow(self, steps: int = 1) -> None:
        with self._lock:
            self._allowed += steps
            self._lock.notify_all()

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            self._lock.notify_all()

    def close(self) -> None:
        """From the next step on the engine waits again; what was allowed before is forgotten."""
        with self._lock:
            self._is_open, self._allowed = False, 0

    def __enter__(self) -> StepGate:
        return self

    def __exit__(self, *error: object) -> None:
        setattr(*self._place, self._behind)
        self.open()


def _known(token: int, drawn: Sequence[Sampled | Exception]) -> int:
    if token >= 0:
        return token
    sampled = drawn[-1 - token]
    return 0 if isinstance(sampled, Exception) else sampled.token_id


class ReplyRunner(ScriptedRunner):
    """Answers chats in the form of :data:`CHATML`: ``respond`` is given the prompt's text and returns the reply.

    The reply's tokens then pass through the real scheduler, cache, grammars, detokenizer and tool parser. Every sample
    of a request is the same. A grammar overrules what does not fit it, as it would a model.
    """

    def __init__(self, tokenizer: Tokenizer, respond: Callable[[str], str], num_blocks: int = 400) -> None:
        super().__init__(num_blocks, vocab_size=tokenizer.vocab_size)
        self.replies: dict[str, list[int]] = {}
        header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

        def next_token(context: list[int]) -> int:
            start = len(context) - context[::-1].index(header[0]) - 1 + len(header)
            prompt = tokenizer.decode(context[:start], skip_special_tokens=False)
            if prompt not in self.replies:
                self.replies[prompt] = [*tokenizer.encode(respond(prompt), add_special_tokens=False), END]
            reply, done = self.replies[prompt], len(context) - start
            return reply[done] if done < len(reply) else END

        self.next_token = next_token

    def _result(self, sequence: ScheduledSequence) -> Result:
        for row in sequence.rows:
            row.seed = 0  # the parent adds it to the token where a request samples
        return super()._result(sequence)


END = 2
"""The id of ``<|im_end|>`` in :func:`small_tokenizer`."""


def reply_engine(respond: Callable[[str], str], tokenizer: Tokenizer | None = None, **options: Any) -> Engine:
    """An engine that answers by ``respond``; options are those of :func:`scripted_core`."""
    from paged_backend.config import EngineConfig
    from paged_backend.engine.engine import Engine

    tokenizer = tokenizer or small_tokenizer()
    runner = ReplyRunner(tokenizer, respond, options.get("num_blocks", 400))
    core = scripted_core(runner=runner, **{"num_blocks": 400, **options})
    return Engine(core, tokenizer, EngineConfig("scripted"), eos_token_ids=[END])


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template of :func:`small_tokenizer`."""


def small_tokenizer(vocab_size: int = 1000, chat_template: str | None = CHATML) -> Tokenizer:
    """A byte-level tokenizer that can spell anything, trained in a moment on some JSON; ``<|im_end|>`` (id 2) ends.

    Its ids 0 to 2 are special: <|endoftext|>, <|im_start|>, <|im_end|>.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from paged_backend.text.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [
        '{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius"}}',
        '{"name":"value","items":[{"id":1,"ok":true},{"id":22,"ok":false}],"note":null}',
        "<tool_call>\n</tool_call>\nthe quick brown fox jumps over the lazy dog user assistant system",
        '"]},{"":"","","],["},{":{":["',
    ]
    backend.train_from_iterator(lines * 8, trainer)
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return Tokenizer(
        backend, named, {} if chat_template is None else {"default": chat_template}, "small_tokenizer"
    )
