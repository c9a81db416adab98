"""Typed records out of free text, all documents in one batch.

    python examples/structured_extraction.py

The grammar makes every output valid for the class; whether it is true is up to the model.

Needs: pip install 'paged-backend[langchain]'
"""

from __future__ import annotations

from typing import Literal

# first: if LangChain is missing, it says what to install
from paged_backend.adapters.langchain import ChatPaged

# isort: split
from langchain_core.prompts import ChatPromptTemplate
from lexical import DOCUMENTS
from pydantic import BaseModel, Field


class Summary(BaseModel):
    """What a text is about."""

    title: str = Field(max_length=40)
    subject: Literal["plants", "history", "visitors", "food"]
    years: list[int] = Field(description="years that the text names", max_length=4)
    one_sentence: str = Field(max_length=120)


def main() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "You describe texts as JSON with title, subject, years and one_sentence."),
            ("human", "{text}"),
        ]
    )
    model = ChatPaged(model="demo", temperature=0, max_tokens=120)
    chain = prompt | model.with_structured_output(Summary)
    paths = sorted(DOCUMENTS.glob("*.md"))
    for path, summary in zip(
        paths, chain.batch([{"text": path.read_text(encoding="utf-8")} for path in paths])
    ):
        print(f"{path.name}: {summary.model_dump_json()}")


if __name__ == "__main__":
    main()
