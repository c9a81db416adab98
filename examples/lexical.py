"""A retriever that needs no model and no network: passages scored by the words they share with the question (BM25)."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

DOCUMENTS = Path(__file__).parent / "documents"


class Passages:
    """The paragraphs of every document in a folder, each under its document's title."""

    def __init__(self, folder: Path = DOCUMENTS) -> None:
        self.texts: list[str] = []
        self.sources: list[str] = []
        for path in sorted(folder.glob("*.md")):
            title, _, body = path.read_text(encoding="utf-8").partition("\n")
            for paragraph in body.strip().split("\n\n"):
                self.texts.append(f"{title.lstrip('# ')}: {' '.join(paragraph.split())}")
                self.sources.append(path.name)
        self._counts = [Counter(_words(text)) for text in self.texts]
        seen = Counter(word for count in self._counts for word in count)
        self._rarity = {word: math.log(1 + len(self.texts) / number) for word, number in seen.items()}
        self._mean = sum(sum(count.values()) for count in self._counts) / len(self._counts)

    def best(self, question: str, k: int) -> list[int]:
        """Numbers of the k passages that fit the question best, the best first."""

        def score(count: Counter[str]) -> float:
            length = sum(count.values()) / self._mean
            return sum(
                self._rarity.get(word, 0.0) * count[word] * 2.2 / (count[word] + 0.3 + 0.9 * length)
                for word in set(_words(question))
            )

        ranked = sorted(range(len(self.texts)), key=lambda i: -score(self._counts[i]))
        return ranked[:k]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
