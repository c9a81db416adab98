"""Worker for llama.cpp: slots over ``llama_decode``, refilled as they fall free. Model: a .gguf file.

Written over the C functions that llama-cpp-python declares, because its Python class decodes one sequence at a time.
Options: slots, batched_tokens, unified (one KV buffer for all slots, 1 or 0), flash (1 or 0), cache_tokens,
repack (1 or 0: weights rearranged for the matrix unit at load).
"""

from __future__ import annotations

import ctypes

from worker_protocol import run_steps, serve

KNOWN = ("slots", "batched_tokens", "unified", "flash", "cache_tokens", "repack")


class LlamaCpp:
    packages = ("llama-cpp-python",)

    def __init__(self, request):
        import llama_cpp
        import numpy as np

        self._c, self._np = llama_cpp, np
        options = dict(request["options"])
        slots = min(int(options.pop("slots", request["max_seqs"])), request["max_seqs"])
        self._budget = int(options.pop("batched_tokens", 512))
        self._prefix_cache = request["prefix_cache"]
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # must outlive the library's use of it
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = str(options.pop("repack", "1")) == "1"
        model = llama_cpp.llama_model_load_from_file(request["model"].encode(), loading)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {request['model']}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = min(slots * request["max_len"], int(options.pop("cache_tokens", 65536)))
        params.n_ctx = max(params.n_ctx, request["max_len"])
        params.n_batch = params.n_ubatch = max(self._budget, slots)
        params.n_seq_max = slots
        params.n_threads = params.n_threads_batch = request["threads"]
        params.kv_unified = str(options.pop("unified", "1")) == "1"
        params.flash_attn_type = int(options.pop("flash", "1"))
        if options:
            raise ValueError(f"unknown options {sorted(options)}; known: {', '.join(KNOWN)}")
        self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise RuntimeError("llama.cpp cannot create the context")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._free = list(range(slots))[::-1]
        self._kept = {}  # slot -> tokens whose KV it still holds

    def run(self, requests):
        self._waiting = []
        self._running = {}  # index -> slot, tokens to compute, position
        return run_steps(self, requests, self._finish)

    def add(self, index, prompt, output):
        self._waiting.append((index, prompt))

    def _finish(self, index):
        state = self._running.pop(index)
        self._free.append(state["slot"])

    def _start(self):
        """Give waiting requests a slot; with the prefix cache, what a slot already holds of the prompt is kept or
        copied, as llama.cpp's server does."""
        while self._waiting and self._free:
            index, prompt = self._waiting.pop(0)
            slot, shared = self._free[-1], 0
            if self._prefix_cache:
                best = max(self._kept, key=lambda s: _common(self._kept[s], prompt), default=None)
                shared = _common(self._kept[best], prompt) if best is not None else 0
                shared = min(shared, len(prompt) - 1)
                if best in self._free:
                    slot = best
                elif shared:
                    self._c.llama_memory_seq_rm(self._memory, slot, 0, -1)
                    self._c.llama_memory_seq_cp(self._memory, best, slot, 0, shared)
            self._free.remove(slot)
            self._c.llama_memory_seq_rm(self._memory, slot, shared, -1)
            self._kept[slot] = prompt[:shared]
            self._running[index] = {"slot": slot, "todo": prompt[shared:], "at": shared}

    def step(self):
        self._start()
        batch, count, wanted = self._batch, 0, []
        states = sorted(self._running.items(), key=lambda item: len(item[1]["todo"]))  # decodes first
        for index, state in states:
            piece = state["todo"][: self._budget - count]
            if not piece:
                break
            for token in piece:
                batch.token[count] = token
                batch.pos[count] = state["at"]
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = state["slot"]
                batch.logits[count] = 0
                state["at"] += 1
                count += 1
            state["todo"] = state["todo"][len(piece) :]
            self._kept[state["slot"]] = self._kept[state["slot"]] + piece if self._prefix_cache else []
            if not state["todo"]:
                batch.logits[count - 1] = 1
                wanted.append((index, count - 1))
        batch.n_tokens = count
        code = self._c.llama_decode(self._ctx, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} (1: no room in the KV cache, lower slots)")
        for index, row in wanted:
            logits = self._c.llama_get_logits_ith(self._ctx, row)
            token = int(self._np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
            self._running[index]["todo"] = [token]
            yield index, [token]


def _common(a, b):
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


if __name__ == "__main__":
    serve(LlamaCpp)
