"""Batch inference over a JSONL file, with a progress bar; results are written in order as they come.

    python examples/hf_batch_jsonl.py prompts.jsonl results.jsonl [model]

Every line of the input has "prompt" (text), or every line has "messages" (a chat); the output repeats the line
and adds "output". Without arguments a small input is made, so that the script can be tried at once.

Needs: pip install paged-backend
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from paged_backend.adapters.huggingface import pipeline


def read(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def example_input() -> Path:
    path = Path(tempfile.mkdtemp()) / "prompts.jsonl"
    animals = ("whale", "owl", "tortoise", "fox", "bee", "horse", "eel", "crow")
    lines = [{"messages": [{"role": "user", "content": f"What does a {animal} eat?"}]} for animal in animals]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input", nargs="?", type=Path)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    source = options.input or example_input()
    target = options.output or source.with_name("results.jsonl")

    generator = pipeline("text-generation", model=options.model)
    total = sum(1 for _ in read(source))
    inputs = (record.get("messages") or record["prompt"] for record in read(source))
    # a generator in, a generator out: any number of prompts in bounded memory, hundreds of them in the engine at once
    results = generator(
        inputs, do_sample=False, max_new_tokens=options.max_new_tokens, return_full_text=False
    )
    with target.open("w", encoding="utf-8") as out:
        for record, result in tqdm(zip(read(source), results), total=total, unit="prompt"):
            out.write(
                json.dumps({**record, "output": result[0]["generated_text"]}, ensure_ascii=False) + "\n"
            )
    print(f"{total} results in {target}")


if __name__ == "__main__":
    main()
