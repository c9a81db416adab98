"""Questions over a folder of documents with a LangChain chain.

    python examples/rag_langchain.py
    python examples/rag_langchain.py "When does the water lily flower?" "Who founded the garden?"

The questions of one run are answered in one batch. The instructions, with which their prompts begin, are computed for
the first; the others find them in the cache.

Needs: pip install 'paged-backend[langchain]'
"""

from __future__ import annotations

import sys

# first: if LangChain is missing, it says what to install
from paged_backend.adapters.langchain import ChatPaged

# isort: split
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from lexical import Passages
from pydantic import SkipValidation

QUESTIONS = [
    "How much is a ticket for an adult?",
    "When was the Palm House built?",
    "Who founded the garden in 1852?",
]

SYSTEM = (
    "You answer the visitors of the Alder Hill Botanical Garden. Keep to names, numbers and years as they are written. "
    "Answer in one short sentence, from these facts only:\n{context}"
)


class LexicalRetriever(BaseRetriever):
    """The three passages that share most with the question."""

    passages: SkipValidation[Passages]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        found = self.passages.best(query, 3)
        return [
            Document(self.passages.texts[i], metadata={"source": self.passages.sources[i]}) for i in found
        ]


def main() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", SYSTEM),
            ("human", "{question}"),
        ]
    )
    retriever = LexicalRetriever(passages=Passages()) | (
        lambda found: "\n".join(d.page_content for d in found)
    )
    model = ChatPaged(model="demo", temperature=0, max_tokens=48)
    chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | model

    questions = sys.argv[1:] or QUESTIONS
    for question, answer in zip(questions, chain.batch(questions)):
        usage = answer.usage_metadata
        print(f"Q: {question}\nA: {answer.content}")
        print(
            f"   {usage['input_tokens']} tokens in, {usage['input_token_details']['cache_read']} from the cache\n"
        )


if __name__ == "__main__":
    main()
