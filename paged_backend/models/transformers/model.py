"""TransformersModel: any decoder of transformers over the paged cache, through the library's own attention interface.

The module computes everything but attention. Its attention layers call a function registered with
transformers, which writes keys and values into the pages of the flat batch and attends over them with our
kernels; transformers' caches are not used.

What a module does with its attention (heads, windows, other state) is not guessed from its config. It is
observed in one forward pass, and then checked: two sequences in one flat batch, computed in chunks, must give
the logits of the module's own attention. A model that keeps other state (a convolution, a recurrence), biases
its scores or looks ahead fails that check and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_backend.batch import Batch
from paged_backend.errors import UnsupportedModelError
from paged_backend.kernels.base import AttentionInputs, DeviceArray, Kernels
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.tensor_attention import TensorAttention
from paged_backend.models.spec import DecoderSpec
from paged_backend.models.transformers.attention import NAME, is_causal_window, register
from paged_backend.sequence_slice import SequenceSlice


@dataclass(frozen=True, slots=True)
class _Layer:
    """How one attention module is called. window: tokens that a query sees, None for all before it."""

    index: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Any
    caches: Sequence[LayerCache]
    slot_mapping: DeviceArray


class TransformersModel:
    """A causal language model of transformers that runs flat batches over paged KV; see ``ModelRunner``.

    module: where the kernels are, float32 or half precision; it is taken over (its attention implementation is set),
    see ``transformers_module.share``.
    Raises UnsupportedModelError, saying why, for a module that this cannot run exactly.
    """

    def __init__(self, module: Any, kernels: Kernels) -> None:
        register()
        self.module = module.eval()
        self.kernels = kernels
        self._attention = TensorAttention(kernels)
        self._device = self._attention.device
        self._step: _Step | None = None
        self._layers: dict[int, _Layer] = {}
        self._probing = False
        self._name = type(module).__name__
        at = next(module.parameters()).device
        if at.type != self._device.type:
            raise UnsupportedModelError(
                f"{self._name} is on {at} and the engine on {kernels.device}: move the model there, "
                f"model.to({kernels.device!r})"
            )
        parameters = inspect.signature(type(module).forward).parameters
        if "position_ids" not in parameters:
            raise UnsupportedModelError(f"{self._name} takes no position_ids, which a flat batch needs")
        self._keeps_logits = "logits_to_keep" in parameters
        expected = self._own_logits()
        self._use(NAME)
        for part in module.modules():
            part._paged_model = self
        self.spec = self._observe()
        self._verify(expected)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: DeviceArray,
        positions: DeviceArray,
        attention: AttentionInputs,
        logit_rows: DeviceArray,
        caches: Sequence[LayerCache],
    ) -> DeviceArray:
        """One step over a flat batch -> logits float32 [R, vocab]; arguments as in ``Decoder.forward``."""
        ids, places, rows = (self._attention.tensor(x) for x in (input_ids, positions, logit_rows))
        self._step = _Step(self._attention.plan(attention), caches, attention.slot_mapping)
        try:
            options = {"logits_to_keep": rows} if self._keeps_logits else {}
            output = self.module(input_ids=ids[None], position_ids=places[None], use_cache=False, **options)
        finally:
            self._step = None
        logits = output.logits[0]
        return self._attention.array((logits if self._keeps_logits else logits[rows]).to(torch.float32))

    def attend(
        self,
        part: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """query [1, H, T, K], key [1, G, T, K], value [1, G, T, V] of one layer -> [1, T, H, V]."""
        if self._probing:
            self._note(part, query, key, value, mask, options)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        layer, step = self._layers[id(part)], self._step
        if step is None:
            raise RuntimeError(f"{self._name} belongs to an engine and is run by it only")
        dim = self.spec.head_dim
        q, k, v = (_flat_heads(x, dim, self._attention.dtype) for x in (query, key, value))
        cache = step.caches[layer.index]
        self._attention.write(q, k, v, cache, step.slot_mapping)
        scale = layer.key_dim**-0.5 if scaling is None else float(scaling)
        if sinks is not None:
            sinks = sinks.detach().to(torch.float32).contiguous()
        out = self._attention.attend(step.plan, q, cache, scale, layer.window, softcap, sinks)
        return out.view(q.shape[0], q.shape[1], dim)[None, :, :, : layer.value_dim].to(query.dtype)

    # --- finding out what the module does ------------------------------------------------------------------------

    def _use(self, implementation: str) -> None:
        if not self.module._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{self._name} computes attention by itself instead of through transformers' attention interface; "
                "it can run with transformers' own generate only"
            )
        self.module.set_attn_implementation(implementation)

    def _ids(self) -> Tensor:
        """Token ids [2, 12] to observe the module with."""
        vocab = self.module.config.get_text_config().vocab_size
        generator = torch.Generator(device="cpu").manual_seed(0)
        ids = torch.randint(0, vocab, (2, 12), generator=generator, dtype=torch.int64, device="cpu")
        return ids.to(self._device)

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:
        self._use("eager")
        ids = self._ids()
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.module(input_ids=ids, position_ids=positions, use_cache=False).logits.to(torch.float32)

    @torch.inference_mode()
    def _observe(self) -> DecoderSpec:
        """Run once with attention that only takes notes."""
        ids = self._ids()[:1]
        self._probing = True
        try:
            output = self.module(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
                use_cache=False,
            )
        finally:
            self._probing = False
        layers = list(self._layers.values())
        if not layers:
            raise UnsupportedModelError(
                f"{self._name} has no attention that goes through transformers' interface"
            )
        if len({layer.kv_heads for layer in layers}) > 1:
            raise UnsupportedModelError(
                f"the layers of {self._name} differ in their number of key/value heads"
            )
        config = self.module.config.get_text_config()
        eos = config.eos_token_id
        context = (
            getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 4096
        )
        return DecoderSpec(
            architecture=self._name,
            vocab_size=output.logits.shape[-1],
            hidden_size=config.hidden_size,
            intermediate_size=0,  # this and the other sizes of the MLP are the module's own business
            num_layers=len(layers),
            num_heads=config.num_attention_heads,
            num_kv_heads=layers[0].kv_heads,
            head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
            norm_eps=0.0,
            activation="",
            max_position=context,
            max_position_limit=context,
            scale=1.0,
            windows=tuple(layer.window for layer in layers),
            rope_specs=(),
            ropes=(),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            bos_token_id=config.bos_token_id,
            pad_token_id=config.pad_token_id,
        )

    def _note(
        self, part: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        if id(part) in self._layers:
            raise UnsupportedModelError(f"{self._name} runs one attention layer several times in a step")
        if options.get("position_bias") is not None:
            raise UnsupportedModelError(f"{self._name} adds a position bias to its attention scores")
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise UnsupportedModelError(
                f"{self._name} attends to something else than the tokens of its input"
            )
        window = self._window(mask, options.get("sliding_window"))
        self._layers[id(part)] = _Layer(len(self._layers), key.shape[1], key.shape[3], value.shape[3], window)

    def _window(self, mask: Any, said: int | None) -> int | None:
        rule, local_size = getattr(mask, "paged_rule", (None, None))
        if rule is None:
            # the module asked for no mask: causal, unless it relies on something that we have not seen
            config = self.module.config.get_text_config()
            if mask is not None or said or getattr(config, "attention_chunk_size", None):
                raise UnsupportedModelError(f"{self._name} masks its attention in a way of its own")
            return None
        window = local_size if local_size is None else int(local_size)
        if not is_causal_window(rule, window):
            raise UnsupportedModelError(
                f"{self._name} masks attention with something else than a causal or sliding window"
            )
        return window

    def _verify(self, expected: Tensor) -> None:
        """Compare the paged path with ``expected`` [2, n, vocab], the logits of the module's own attention."""
        ids, block_size = self._ids(), 4
        total = ids.shape[1]
        kernels, spec = self.kernels, self.spec
        caches = kernels.empty_cache(
            spec.num_layers, 8, spec.num_kv_heads, spec.head_dim, block_size, kernels.dtype
        )
        tables = [
            np.array([3, 1, 6], np.int32),
            np.array([2, 7, 4], np.int32),
        ]
        got: list[list[Tensor]] = [[], []]
        for spans in (((0, 5), (0, total)), ((5, total), None)):
            work = [(i, span) for i, span in enumerate(spans) if span is not None]
            slices = [
                SequenceSlice(ids[i, low:high].tolist(), low, tables[i], range(high - low))
                for i, (low, high) in work
            ]
            batch = Batch.build(slices, block_size).on(kernels)
            logits = self._attention.tensor(
                self.forward(batch.input_ids, batch.positions, batch.attention, batch.logit_rows, caches)
            )
            for (i, _), part in zip(work, logits.split([high - low for _, (low, high) in work])):
                got[i].append(part)
        mine = torch.stack([torch.cat(parts) for parts in got])
        exact = next(self.module.parameters()).dtype == torch.float32
        error = float((mine - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if not error <= (1e-3 if exact else 5e-2):
            raise UnsupportedModelError(
                f"{self._name} gives other logits over paged attention than over its own (relative difference "
                f"{error:.1e}): it keeps state outside of attention or masks in a way that was not recognised; "
                "use transformers' own generate for it"
            )


def _flat_heads(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, T, d] -> [T, heads, dim], zero-padded, its last two dimensions contiguous."""
    flat = x[0].transpose(0, 1).to(dtype)
    if flat.shape[2] < dim:
        return F.pad(flat, (0, dim - flat.shape[2]))
    return flat if flat.stride(2) == 1 and flat.stride(1) == dim else flat.contiguous()
