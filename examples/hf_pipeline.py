"""Drop-in pipeline: the import differs, the calls and their results do not, and a list runs as one batch.

python examples/hf_pipeline.py [model]

Needs: pip install paged-backend
"""

import sys

from paged_backend.adapters.huggingface import pipeline  # was: from transformers import pipeline

generator = pipeline("text-generation", model=sys.argv[1] if len(sys.argv) > 1 else "demo")

print(generator("The secret to baking a good cake is ", do_sample=False, max_new_tokens=20))

questions = ["What is the capital of France?", "Name a mammal that lives in the sea.", "What is 2 + 2?"]
chats = [[{"role": "user", "content": question}] for question in questions]
for question, answers in zip(questions, generator(chats, do_sample=False, max_new_tokens=40)):
    print(question, "->", answers[0]["generated_text"][-1]["content"])
