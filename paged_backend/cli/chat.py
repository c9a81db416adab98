"""``paged-backend chat``: a conversation in the terminal. Every turn finds the earlier ones in the prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.common import complain, open_engine, orderly_end
from paged_backend.cli.flags import checked_config, checked_params, sampling_params, with_flags
from paged_backend.cli.help import HeadedCommand, single_command

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.outputs import RequestOutput

app = single_command()

HELP = """\
/system TEXT   set the system message (without TEXT: remove it)
/reset         forget the conversation, keep the system message
/stats         tokens and speed of the last answer
/exit, /quit   leave (so does Ctrl-D)
Ctrl-C stops an answer; what has been said so far stays in the conversation."""


@app.command("chat", cls=HeadedCommand)
@with_flags("sampling", "engine")
def chat(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'demo'.")],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with a model; /help lists the commands. Works with piped input too, one turn per line."""
    checked_config(model, engine)
    checked_params(sampling)
    for name in ("n", "logprobs", "prompt_logprobs"):
        if sampling.get(name) not in (None, 1 if name == "n" else None):
            raise typer.BadParameter(f"--{name.replace('_', '-')} has no place in a conversation")
    with orderly_end(), open_engine(model, engine) as opened:
        if opened.tokenizer is None or opened.tokenizer.chat_template is None:
            complain(
                f"{model!r} has no chat template: take an instruction-tuned model, or `paged-backend run`"
            )
            raise typer.Exit(1)
        Conversation(opened, sampling, system).loop()


class Conversation:
    """The messages so far and what can be done with them."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], system: str | None) -> None:
        self.engine = engine
        self.sampling = sampling
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.last: RequestOutput | None = None
        self.terminal = sys.stdin.isatty()
        self.failed = False

    def loop(self) -> None:
        """Read turns until the input ends. From a pipe, a turn that failed makes the exit status 1."""
        if self.terminal:
            import contextlib

            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its line editing and history)

            typer.echo("/help lists the commands", err=True)
        while True:
            try:
                line = input(">>> " if self.terminal else "")
            except EOFError:
                if self.terminal:
                    typer.echo(err=True)  # the shell's prompt begins on a line of its own
                break
            except KeyboardInterrupt:
                typer.echo("\n/exit or Ctrl-D leaves", err=True)
                continue
            if line.startswith("/"):
                if self.command(line):
                    break
            elif line.strip():
                self.answer(line)
        if self.failed and not self.terminal:
            raise typer.Exit(1)

    def command(self, line: str) -> bool:
        """Do what a line with a slash says; True to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return True
        if name == "/reset":
            self.turns.clear()
        elif name == "/system":
            self.system = rest.strip() or None
        elif name == "/stats":
            typer.echo(self.stats())
        elif name == "/help":
            typer.echo(HELP)
        else:
            self.failed = True
            complain(f"unknown command {name}; /help lists them")
        return False

    def answer(self, text: str) -> None:
        """Take the user's turn and stream the model's. A turn that cannot be run is taken back."""
        from dataclasses import replace

        from paged_backend.errors import ContextOverflowError, PagedBackendError
        from paged_backend.sampling_params import RequestOutputKind
        from paged_backend.toolcalls import chat_prompt

        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": text}]
        params = replace(sampling_params(self.sampling), output_kind=RequestOutputKind.DELTA)
        said = ""
        try:
            handle = self.engine.submit(chat_prompt(self.engine.tokenizer, messages), params)
            try:
                for output in handle:
                    said += output.outputs[0].text
                    print(output.outputs[0].text, end="", flush=True)
            except KeyboardInterrupt:
                handle.abort()
            print(flush=True)
            self.last = handle.wait()
        except (PagedBackendError, ValueError) as error:
            self.failed = True
            hint = "; /reset starts anew" if isinstance(error, ContextOverflowError) and self.turns else ""
            complain(f"{error}{hint}")
            return
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]

    def stats(self) -> str:
        """Tokens and times of the last answer, and the KV pool."""
        if self.last is None:
            return "no answer yet"
        output, engine = self.last, self.engine.stats()
        made = len(output.outputs[0].token_ids)
        lines = [
            f"prompt {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of them from the prefix cache",
            f"answer {made} tokens ({output.outputs[0].finish_reason})",
        ]
        times = output.metrics
        if times is not None and times.first_token_time is not None and times.last_token_time is not None:
            lines.append(f"first token after {times.first_token_time - times.arrival_time:.3f} s")
            if made > 1:
                rate = (made - 1) / max(times.last_token_time - times.first_token_time, 1e-9)
                lines[-1] += f", then {rate:.1f} tokens/s"
        lines.append(
            f"KV pool: {engine.kv_blocks_used} blocks in use, {engine.kv_blocks_cached} cached, "
            f"{engine.kv_blocks_total} in all"
        )
        return "\n".join(lines)
