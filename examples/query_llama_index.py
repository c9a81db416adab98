"""Questions over a folder of documents with a LlamaIndex query engine.

python examples/query_llama_index.py
python examples/query_llama_index.py "When does the water lily flower?"

Needs: pip install 'paged-backend[llama-index]'
"""

from __future__ import annotations

import sys

# first: if LlamaIndex is missing, it says what to install
from paged_backend.adapters.llama_index import PagedLLM

# isort: split
from lexical import Passages
from llama_index.core import PromptTemplate, QueryBundle
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

QUESTIONS = [
    "How many kinds of cactus are there?",
    "What does a yearly pass cost?",
    "When is breakfast served?",
]
PROMPT = PromptTemplate(
    "Facts:\n{context_str}\n\nAnswer in one short sentence, from the facts only: {query_str}"
)


class LexicalRetriever(BaseRetriever):
    """The three passages that share most with the question."""

    def __init__(self) -> None:
        self._passages = Passages()
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._passages.best(query_bundle.query_str, 3)
        return [NodeWithScore(node=TextNode(text=self._passages.texts[i]), score=1.0) for i in found]


def main() -> None:
    llm = PagedLLM("demo", temperature=0, max_tokens=48)
    engine = RetrieverQueryEngine.from_args(
        LexicalRetriever(), llm=llm, text_qa_template=PROMPT, streaming=True
    )
    for question in sys.argv[1:] or QUESTIONS:
        print(f"Q: {question}\nA: ", end="")
        for piece in engine.query(question).response_gen:
            print(piece, end="", flush=True)
        print("\n")


if __name__ == "__main__":
    main()
