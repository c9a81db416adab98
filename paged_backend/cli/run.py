"""``paged-backend run``: many prompts through one engine, results as they are ready."""

from __future__ import annotations

import itertools
import json
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.common import complain, open_engine, orderly_end
from paged_backend.cli.flags import checked_config, checked_params, sampling_params, with_flags
from paged_backend.cli.items import NO_PROMPTS, Item, check_source, from_arguments, from_file, is_stdin
from paged_backend.cli.records import error_record, result_record

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.engine.stream import RequestHandle

LOOK_EVERY = 0.02
"""Seconds between two looks at what has finished."""


@with_flags("sampling", "engine")
def run(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'demo'.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: read --input.")] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="File with one request per line; - or nothing for stdin."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Of the input: text (a prompt per line) or jsonl. Default: jsonl for files named .jsonl or .ndjson, "
            "else text, in which lines that look like JSONL are refused."
        ),
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Stream the answer of a single prompt as plain text instead of JSON."),
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Put prompts into the model's chat template. Default: if it has one.", show_default=False
        ),
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: if that is a terminal.", show_default=False),
    ] = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Generate for every prompt; one JSON object per line on stdout, as soon as each request is done.

    Prompts are arguments, lines of a text file, or lines of a JSONL file: objects with "prompt", "messages" or
    "prompt_token_ids", and if wanted "params" (sampling parameters of this line) and "id" (given back).
    Lines that cannot be run are reported on stderr and as objects with "error"; the exit status is then 1.
    """
    checked_config(model, engine)
    checked_params(sampling)
    if prompts and input is not None:
        raise typer.BadParameter("give prompts as arguments or --input, not both")
    if not prompts:
        check_source(input, format)
        if input is None and sys.stdin.isatty():
            complain("reading prompts from the terminal, one per line; end with Ctrl-D")
    items = from_arguments(prompts) if prompts else from_file(input, format)
    if text:
        if sampling.get("n", 1) > 1 or len(prompts or ()) > 1:
            raise typer.BadParameter("--text streams the answer of one prompt: give one prompt and n=1")
        if {"logprobs", "prompt_logprobs"} & sampling.keys():
            raise typer.BadParameter("--text has no place for logprobs: leave out --text or the logprobs")
    with orderly_end(), open_engine(model, engine) as opened:
        session = _Session(opened, sampling, chat)
        good = session.stream_text(items) if text else session.run(items, progress)
        if not prompts and is_stdin(input) and good and not session.taken:
            complain(NO_PROMPTS)  # a pipe that ended after a while
            raise typer.Exit(2)
    if not good:
        raise typer.Exit(1)


class _Session:
    """One run: submits items while there is room, prints what has finished."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], chat: bool | None) -> None:
        self.engine = engine
        self.sampling = sampling
        self.chat = engine.tokenizer.chat_template is not None if chat is None else chat
        self.good = True
        self.taken = 0

    def submit(self, item: Item, **extra: Any) -> RequestHandle:
        """Raises ValueError (RequestRejectedError is one) or TypeError for an item that cannot be run."""
        if item.error is not None:
            raise ValueError(item.error)
        params = sampling_params({**self.sampling, **item.params})
        if extra:
            from dataclasses import replace

            params = replace(params, **extra)
        return self.engine.submit(self._prompt(item), params)

    def _prompt(self, item: Item) -> Any:
        from paged_backend.toolcalls import chat_prompt

        if item.kind == "prompt_token_ids":
            return {"prompt_token_ids": item.value}
        if item.kind == "prompt" and not self.chat:
            return item.value
        messages = item.value if item.kind == "messages" else [{"role": "user", "content": item.value}]
        return chat_prompt(self.engine.tokenizer, messages)

    def fail(self, item: Item, error: Exception | str, kind: str = "rejected") -> None:
        self.good = False
        place = f"line {item.line}" if item.line is not None else f"prompt {item.index + 1}"
        complain(f"{place}: {error}")
        self.print(error_record(item, kind, str(error)))

    @staticmethod
    def print(record: Mapping[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), flush=True)

    def stream_text(self, items: Iterator[Item]) -> bool:
        from paged_backend.errors import PagedBackendError
        from paged_backend.sampling_params import RequestOutputKind

        first = list(itertools.islice(items, 2))
        if len(first) != 1:
            complain(
                f"--text streams the answer of one prompt, the input has {'none' if not first else 'more'}"
            )
            return False
        self.taken = 1
        try:
            for output in self.submit(first[0], output_kind=RequestOutputKind.DELTA):
                print(output.outputs[0].text, end="", flush=True)
        except (ValueError, TypeError, PagedBackendError) as error:
            complain(str(error))
            return False
        print()
        return True

    def run(self, items: Iterator[Item], progress: bool | None) -> bool:
        from paged_backend.errors import PagedBackendError

        window = max(1024, 4 * self.engine.config.max_num_seqs)  # enough for the scheduler to choose from
        arriving = _Arriving(items, window)
        pending: dict[RequestHandle, Item] = {}
        bar = _Bar(self.engine, sys.stderr.isatty() if progress is None else progress)
        try:
            while not arriving.ended or pending:
                # with nothing to look after, sleep until something arrives
                for item in arriving.take(window - len(pending), None if not pending else LOOK_EVERY):
                    try:
                        pending[self.submit(item)] = item
                    except (ValueError, TypeError, PagedBackendError) as error:
                        self.fail(item, error)
                    self.taken += 1
                    bar.total = self.taken
                for handle in [h for h in pending if h.finished]:
                    item = pending.pop(handle)
                    output = handle.wait()
                    if output.error is not None:
                        self.fail(item, output.error, "failed")
                    else:
                        self.print(result_record(item, output))
                bar.show(len(pending))
                if pending and self.engine.health == "dead":
                    raise PagedBackendError(
                        f"the engine's thread ended with {len(pending)} requests unanswered"
                    )
            if arriving.failure is not None:
                complain(f"the input broke off: {arriving.failure}")
                self.good = False
        finally:
            bar.close()
            for handle in pending:
                handle.abort()
        return self.good


class _Arriving:
    """Items read ahead in a thread, so that a slow pipe holds up neither the engine nor the results."""

    def __init__(self, items: Iterator[Item], ahead: int) -> None:
        self._queue: queue.Queue[Item | None] = queue.Queue(ahead)
        self.ended = False
        self.failure: Exception | None = None
        threading.Thread(target=self._read, args=(items,), name="paged_backend-input", daemon=True).start()

    def _read(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                self._queue.put(item)
        except OSError as error:
            self.failure = error
        finally:
            self._queue.put(None)

    def take(self, most: int, patience: float | None) -> list[Item]:
        """What has arrived, at most ``most`` items; waits up to ``patience`` seconds (None: for ever) for the first."""
        if self.ended or most <= 0:
            if patience is not None:
                threading.Event().wait(patience)
            return []
        taken: list[Item] = []
        while len(taken) < most:
            try:
                item = self._queue.get(block=not taken, timeout=patience)
            except queue.Empty:
                break
            if item is None:
                self.ended = True
                break
            taken.append(item)
        return taken


class _Bar:
    """tqdm over the requests known so far, with the rate and the KV memory in use."""

    def __init__(self, engine: Engine, wanted: bool) -> None:
        self.total = 0
        self._engine = engine
        self._bar: Any = None
        if wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=0, desc="requests", unit="req", file=sys.stderr, dynamic_ncols=True)

    def show(self, pending: int) -> None:
        bar = self._bar
        if bar is None:
            return
        bar.total = self.total
        bar.n = self.total - pending
        stats = self._engine.stats()
        rate = stats.generation_tokens / max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{rate:.1f} tok/s, KV {stats.kv_usage:.0%}", refresh=False)
        bar.update(0)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
