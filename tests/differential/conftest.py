"""Small random models of many architectures, each as transformers has it and as we load it from its folder.

``pytest tests/differential -m 'slow or not slow' --architectures-table docs/architectures.md`` writes the
table of architectures from the results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paged_backend.adapters.huggingface import PagedModelForCausalLM

VOCAB = 101


class _Records(logging.Handler):
    """Collects fallbacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class Pair:
    """theirs: the transformers model. ours: the paged model of the folder that it was saved in."""

    theirs: Any
    ours: Any
    path: Path

    @property
    def native(self) -> bool:
        return type(self.ours.engine._core.runner.model).__name__ == "Decoder"

    def run(self, inputs: Any = None, **options: Any) -> Any:
        """``ours.generate``; fails if the engine handed the call to transformers."""
        said = _Records()
        logger = logging.getLogger("paged_backend")
        logger.addHandler(said)
        try:
            return self.ours.generate(inputs, **options)
        finally:
            logger.removeHandler(said)
            assert not said.messages

    def check(self, inputs: Any = None, **options: Any) -> torch.Tensor:
        """Both must generate the same; the engine must not have handed the call to transformers. Returns the ids."""
        expected = self.theirs.generate(inputs, **options)
        got = self.run(inputs, **options)
        if isinstance(expected, torch.Tensor):
            assert got.tolist() == expected.tolist()
            return got
        assert type(got) is type(expected)
        assert got.sequences.tolist() == expected.sequences.tolist()
        return got.sequences


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """(class name without ForCausalLM or LMHeadModel, config fields, engine options) -> Pair, made once."""
    made: dict[str, Pair] = {}

    def make(name: str, config: dict[str, Any], **engine_options: Any) -> Pair:
        key = repr((name, sorted(config.items()), sorted(engine_options.items())))
        if key not in made:
            theirs = random_model(name, config)
            path = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(path)
            options = {"kernels": "reference", "max_num_batched_tokens": 24, **engine_options}
            made[key] = Pair(theirs, PagedModelForCausalLM.from_pretrained(path, **options), path)
        return made[key]

    yield make
    for pair in made.values():
        pair.ours.engine.check()
        assert pair.ours.engine.stats().kv_blocks_used == 0
        pair.ours.engine.close()


def random_model(name: str, config: dict[str, Any]) -> Any:
    """Weights large enough to matter, norms and biases included, so that nothing wrong can hide."""
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(
        transformers, f"{name}LMHeadModel"
    )
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.config.eos_token_id = model.config.pad_token_id = None
    return model


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Path]:
    """(class name, config fields) -> folder."""

    def make(name: str, config: dict[str, Any]) -> Path:
        path = tmp_path_factory.mktemp(name)
        random_model(name, config).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def batch() -> Callable[..., dict[str, torch.Tensor]]:
    """Prompt lengths -> left-padded input_ids and attention_mask, random but the same each time."""

    def make(*lengths: int, pad: int = 0, seed: int = 1) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.full((len(lengths), max(lengths)), pad)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, -length:] = torch.randint(3, VOCAB, (length,), generator=generator)
            mask[row, -length:] = 1
        return {"input_ids": ids, "attention_mask": mask}

    return make


# --- the table of architectures, written from the results of test_architectures.py ---------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--architectures-table", metavar="FILE", help="write the table of tested architectures there"
    )


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call":
        for name, value in item.user_properties:
            if name == "architecture":
                rows = item.config.stash.setdefault(_ROWS, {})
                passed = call.excinfo is None
                rows.setdefault(value["class"], {})[value["claim"]] = value["result"] if passed else "FAILS"


_CLAIMS = ("greedy", "penalties", "beams")
_ROWS = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--architectures-table")
    rows = session.config.stash.get(_ROWS, {})
    if not target or not rows:
        return
    run = {name: row for name, row in rows.items() if row.get("greedy") != "refused"}
    refused = ", ".join(sorted(name for name in rows if name not in run))
    lines = [
        "# Architectures",
        "",
        "Written by `pytest tests/differential -m 'slow or not slow' --architectures-table docs/architectures.md`",
        f"from the results of the tests, with transformers {transformers.__version__}. Each is a small random model,",
        "saved, loaded by the engine and compared with `transformers.generate` token for token: a left-padded",
        "batch decoded greedily, the same with a repetition penalty and no_repeat_ngram_size, and a beam search.",
        "",
        "`native`: our own decoder over packed weights. `module`: the transformers module over paged attention.",
        "",
        "| architecture | runs | " + " | ".join(_CLAIMS) + " |",
        "| --- | --- |" + " --- |" * len(_CLAIMS),
    ]
    for name, row in sorted(run.items()):
        cells = [row.get("class", name), row.get("path", ""), *(row.get(claim, "") for claim in _CLAIMS)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{len(run)} architectures run. Refused with an error that says why, because they keep state outside of",
        f"attention or do not use transformers' attention interface: {refused}.",
        "",
    ]
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
