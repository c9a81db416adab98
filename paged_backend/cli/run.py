"""``paged-backend run``: many prompts through one engine, results as they are ready."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from paged_backend.cli.arriving import Arriving
from paged_backend.cli.common import complain, open_engine, orderly_end
from paged_backend.cli.flags import checked_config, checked_params, sampling_params, with_flags
from paged_backend.cli.help import HeadedCommand, single_command
from paged_backend.cli.items import (
    NO_PROMPTS,
    Item,
    check_source,
    from_arguments,
    from_file,
    is_stdin,
    open_source,
)
from paged_backend.cli.records import error_record, result_record
from paged_backend.text.fim import fill_in
from paged_backend.tokenization import needed

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.engine.stream import RequestHandle

app = single_command()

LOOK_EVERY = 0.02
"""Seconds between two looks at what has finished."""


@app.command("run", cls=HeadedCommand)
@with_flags("sampling", "engine")
def run(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'demo'.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: read --input.")] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="File with one request per line; - or nothing for stdin."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the results. Default: stdout.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Of the input: text (a prompt per line), jsonl or openai (a batch of OpenAI's API). Default: what "
            "files named .jsonl or .ndjson begin with, else text, in which lines that look like JSON are refused."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a batch of OpenAI's API: the model's name in its lines; may be repeated. Default: MODEL."
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
    "prompt_token_ids", and if wanted "params" (sampling parameters of this line), "id" (given back) and "suffix" (the
    text that follows a prompt, for models that fill in the middle); or objects with
    "custom_id", "url" and "body", a batch of OpenAI's API, which is answered in its form.
    Lines that cannot be run are reported on stderr and as objects with "error"; the exit status is then 1.
    """
    checked_config(model, engine)
    checked_params(sampling)
    if prompts and input is not None:
        raise typer.BadParameter("give prompts as arguments or --input, not both")
    if not prompts:
        format = check_source(input, format)
        if input is not None and output is not None and output.exists() and input.samefile(output):
            raise typer.BadParameter(f"--output {output} is the input, which would be lost")
        if input is None and sys.stdin.isatty():
            complain("reading prompts from the terminal, one per line; end with Ctrl-D")
    if format == "openai":
        given = {"--text": text, "--chat": chat is not None, "sampling options": sampling, "prompts": prompts}
        for name in (name for name, value in given.items() if value):
            raise typer.BadParameter(f"a batch of OpenAI's API says it all in its lines: leave out {name}")
        _run_openai_batch(model, engine, served_model_name or (), input, output, progress)
        return
    if served_model_name:
        raise typer.BadParameter("--served-model-name is for a batch of OpenAI's API: see --format")
    items = from_arguments(prompts) if prompts else from_file(input, format)
    if text:
        if sampling.get("n", 1) > 1 or len(prompts or ()) > 1:
            raise typer.BadParameter("--text streams the answer of one prompt: give one prompt and n=1")
        if {"logprobs", "prompt_logprobs"} & sampling.keys():
            raise typer.BadParameter("--text has no place for logprobs: leave out --text or the logprobs")
    with orderly_end(), _results(output) as out, open_engine(model, engine) as opened:
        session = _Session(opened, sampling, chat, out)
        good = session.stream_text(items) if text else session.run(items, progress)
        if not prompts and is_stdin(input) and good and not session.taken:
            complain(NO_PROMPTS)  # a pipe that ended after a while
            raise typer.Exit(2)
    if not good:
        raise typer.Exit(1)


def _run_openai_batch(
    model: str,
    engine: Mapping[str, Any],
    names: Sequence[str],
    input: Path | None,
    output: Path | None,
    progress: bool | None,
) -> None:
    from paged_backend.cli.openai_batch import lines_of, run_batch
    from paged_backend.config import EngineConfig
    from paged_backend.errors import PagedBackendError

    def write(record: Mapping[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), file=out, flush=True)

    shown = sys.stderr.isatty() if progress is None else progress
    config = EngineConfig.from_options(model, **engine)
    with orderly_end(), _results(output) as out, open_source(input) as source:
        try:
            good = run_batch(config, tuple(names), lines_of(source), write, shown)
        except (PagedBackendError, ValueError, ImportError) as error:
            complain(f"cannot run the batch on {model!r}: {error}")
            raise typer.Exit(1) from error
    if not good:
        raise typer.Exit(1)


def _results(path: Path | None) -> AbstractContextManager[TextIO]:
    """Where results go: a file, or stdout for None."""
    try:
        return nullcontext(sys.stdout) if path is None else path.open("w", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error


class _Session:
    """One run: submits items while there is room, prints what has finished to ``out``."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], chat: bool | None, out: TextIO) -> None:
        self.out = out
        self.engine = engine
        self.sampling = sampling
        knows_chats = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
        self.chat = knows_chats if chat is None else chat
        self.good = True
        self.taken = 0

    def submit(self, item: Item, **extra: Any) -> RequestHandle:
        """Raises ValueError (RequestRejectedError is one) or TypeError for an item that cannot be run."""
        if item.error is not None:
            raise ValueError(item.error)
        params = sampling_params({**self.sampling, **item.params})
        if item.suffix is not None:
            filling = fill_in(needed(self.engine.tokenizer))
            prompt: Any = {"prompt_token_ids": filling.encode(item.value, item.suffix)}
            extra["stop_token_ids"] = [*(params.stop_token_ids or ()), *filling.stop_ids]
        else:
            prompt = self._prompt(item)
        return self.engine.submit(prompt, replace(params, **extra) if extra else params)

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

    def print(self, record: Mapping[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), file=self.out, flush=True)

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
                print(output.outputs[0].text, end="", file=self.out, flush=True)
        except (ValueError, TypeError, PagedBackendError) as error:
            complain(str(error))
            return False
        print(file=self.out)
        return True

    def run(self, items: Iterator[Item], progress: bool | None) -> bool:
        from paged_backend.errors import PagedBackendError

        window = max(1024, 4 * self.engine.config.max_num_seqs)  # enough for the scheduler to choose from
        arriving = Arriving(items, window)
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
