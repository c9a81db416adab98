"""Worker for OpenVINO GenAI's ContinuousBatchingPipeline. Model: a .gguf file, or a folder that it can read.

Options: precision (``default``, or an element type such as ``f32`` for INFERENCE_PRECISION_HINT), batched_tokens,
cache_gb, and any upper-case plugin property as it is (``KV_CACHE_PRECISION=f32``).
"""

from __future__ import annotations

from worker_protocol import run_steps, serve


class OpenVino:
    packages = ("openvino-genai", "openvino")

    def __init__(self, request):
        import openvino_genai as genai

        self._genai = genai
        options = dict(request["options"])
        properties = {
            "INFERENCE_NUM_THREADS": request["threads"],
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # it would take cores of its own choice
        }
        precision = options.pop("precision", "default")
        if precision != "default":
            properties["INFERENCE_PRECISION_HINT"] = precision
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = request["max_seqs"]
        scheduler.max_num_batched_tokens = int(options.pop("batched_tokens", 512))
        scheduler.enable_prefix_caching = request["prefix_cache"]
        scheduler.cache_size = int(options.pop("cache_gb", 2))
        scheduler.dynamic_split_fuse = True
        for name in list(options):
            if name.isupper():
                properties[name] = options.pop(name)
        if options:
            raise ValueError(f"unknown options {sorted(options)}; known: precision, batched_tokens, cache_gb")
        self.pipeline = genai.ContinuousBatchingPipeline(request["model"], scheduler, "CPU", properties)
        self._count = 0

    def run(self, requests):
        self._handles = {}
        return run_steps(self, requests)

    def add(self, index, prompt, output):
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([prompt], np.int64))
        self._count += 1
        self._handles[index] = self.pipeline.add_request(self._count, ids, config)

    def step(self):
        self.pipeline.step()
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                for piece in handle.read().values():
                    yield index, list(piece.generated_ids)


if __name__ == "__main__":
    # OpenVINO 2026.4 dies (SIGFPE) while it compiles bf16 math in a process that may use one core only
    serve(OpenVino, pin_first=False)
