"""Drop-in generate: one line differs from a script for transformers.

python examples/hf_generate.py [model]

Needs: pip install paged-backend
"""

import sys

from paged_backend.adapters.huggingface import PagedModelForCausalLM, load_tokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "demo"
model = PagedModelForCausalLM.from_pretrained(name)  # was: AutoModelForCausalLM.from_pretrained(name)
tokenizer = load_tokenizer(name, model)  # AutoTokenizer, which also reads "demo" and .gguf files

prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")

greedy = model.generate(**inputs, max_new_tokens=20, do_sample=False)
beams = model.generate(**inputs, max_new_tokens=20, num_beams=4, no_repeat_ngram_size=3, do_sample=False)
sampled = model.generate(**inputs, max_new_tokens=20, do_sample=True, temperature=0.8, num_return_sequences=2)

for title, ids in (("greedy", greedy), ("beam search", beams), ("sampled, two each", sampled)):
    print(f"--- {title}")
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        print(repr(text))
