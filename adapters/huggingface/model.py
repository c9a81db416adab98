"""PagedGeneration: put before a model's own class, it sends that model's ``generate`` to the engine.

All of transformers' preparation runs unchanged (checks, warnings, generation config, processors, criteria);
only its decoding loops ``_sample`` and ``_beam_search`` are replaced, where the engine can do what was asked.
Otherwise they run as they are, said in one log line, on the module, whose weights are loaded only then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_backend.adapters.huggingface.beams import BeamCall
from paged_backend.adapters.huggingface.call import EngineCall
from paged_backend.adapters.huggingface.processors import PreparedProcessors
from paged_backend.adapters.huggingface.state import SUBMIT, Paged, Pending, Submitted, fingerprint
from paged_backend.engine.engine import Engine
from paged_backend.errors import RequestRejectedError

logger = logging.getLogger("paged_backend")


class PagedGeneration:
    """Mixin of :func:`paged_class`; see the module docstring."""

    _paged: Paged

    @property
    def engine(self) -> Engine:
        """The engine that generates for this model."""
        return self._paged.engine

    # --- generate ------------------------------------------------------------------------------------------------

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``GenerationMixin.generate``, with the same arguments and results, run by the engine where it can.

        ``cache_implementation="paged"`` is what happens anyway. The result's ``cache`` is None: the engine
        keeps its own.
        """
        call = kwargs.pop("paged_call", None)
        if isinstance(call, Pending):
            return call.result()
        if call == SUBMIT:
            raise Submitted(self.submit(inputs, *args, **kwargs))
        if kwargs.get("cache_implementation") == "paged":
            del kwargs["cache_implementation"]
        if kwargs.get("custom_generate") is not None or len(args) > 9:
            kwargs.pop("paged_defer", None)
            return self._plainly("it brings its own decoding loop").generate(inputs, *args, **kwargs)
        config = kwargs.get("generation_config") or next(iter(args), None)
        if getattr(config, "is_assistant", False):
            # a few tokens at a time, for a decoding loop that goes on from the cache that it gets back
            return self._assistant().generate(inputs, *args, **kwargs)
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def submit(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Pending:
        """Like :meth:`generate` without waiting, so that many calls of different shapes run as one batch."""
        outcome = self.generate(inputs, *args, paged_defer=True, **kwargs)
        return outcome if isinstance(outcome, Pending) else Pending(lambda: outcome)

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Continue each list of token ids -> ``{"req_0": GenerationOutput, ...}``, as in transformers.

        kwargs: fields of the generation config. A prompt that cannot run has its message in ``error``; the
        others go on. With ``num_return_sequences`` n the further samples are ``req_0__child#0``, ...
        continuous_batching_config and warmup size pools of transformers' own implementation; the engine's are
        given when the model is made.
        """
        from paged_backend.adapters.huggingface.batch import generate_batch

        config = continuous_batching_config
        if record_timestamps or getattr(config, "return_logprobs", False):
            logger.warning(
                "generate_batch: timestamps and logprobs come from transformers' own implementation"
            )
            return self._plain().generate_batch(
                inputs,
                generation_config,
                config,
                record_timestamps,
                progress_bar,
                persistent_manager,
                warmup,
                **kwargs,
            )
        return generate_batch(self, inputs, generation_config, progress_bar, kwargs)

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> dict[str, Any]:
        defer = kwargs.pop("paged_defer", False)
        found = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **more)  # type: ignore[misc]
        return {**found, "paged_defer": True} if defer else found

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: Any
    ) -> None:
        """Put transformers' cache off until it is known to be needed."""
        if str(generation_mode.value) in ("assisted_generation",) or model_kwargs.get("cache") is not None:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, *sizes
            )
        else:
            model_kwargs["paged_cache"] = (generation_mode, *sizes)

    def _get_logits_processor(self, **arguments: Any) -> Any:
        build = super()._get_logits_processor  # type: ignore[misc]
        return PreparedProcessors(build(**arguments), build, arguments)

    def _sample(self, input_ids: Tensor, **options: Any) -> Any:
        return self._decode(EngineCall, super()._sample, input_ids, **options)  # type: ignore[misc]

    def _beam_search(self, input_ids: Tensor, **options: Any) -> Any:
        return self._decode(BeamCall, super()._beam_search, input_ids, **options)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, paged_defer: bool = False, **options: Any) -> Any:
        self._plainly("assisted decoding")
        return super()._assisted_decoding(*args, **options)  # type: ignore[misc]

    def _decode(
        self,
        kind: type[EngineCall],
        theirs: Callable[..., Any],
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        paged_defer: bool = False,
        paged_cache: tuple[Any, ...] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        @torch.no_grad()
        def fall_back(reason: str) -> Any:
            self._plainly(reason)
            if paged_cache is not None:
                super(PagedGeneration, self)._prepare_cache_for_generation(  # type: ignore[misc]
                    generation_config, model_kwargs, *paged_cache
                )
            options = {} if streamer is None else {"streamer": streamer}
            return theirs(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                **options,
                **model_kwargs,
            )

        def finish() -> Any:
            result = call.result()
            return fall_back("it goes on past the model's context") if result is None else result

        reason = "synced_gpus is set" if synced_gpus else self._refresh()
        if reason is None:
            call = kind(
                self.engine,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                streamer,
            )
            reason = call.why_not()
        if reason is None:
            try:
                call.submit()
            except RequestRejectedError as error:
                reason = str(error)
        if reason is not None:
            return fall_back(reason)
        return Pending(finish, call.cancel) if paged_defer else finish()

    def _refresh(self) -> str | None:
        """Make sure that the engine has the module's weights as they are now; or why it cannot have them."""
        paged = self._paged
        if paged.load is not None:
            return None
        if self.training:  # type: ignore[attr-defined]
            return "the model is in training mode"
        places = {parameter.device.type for parameter in self.parameters()}  # type: ignore[attr-defined]
        if places != {"cpu"}:
            return f"the model is on {', '.join(sorted(places))}"
        with paged.lock:
            now = fingerprint(self)  # type: ignore[arg-type]
            if paged.seen is None or now == paged.seen:
                paged.seen = now
                return None
            if now.structure != paged.seen.structure:
                return "its modules were changed (adapters?)"
            logger.info("the weights of %s have changed: building its engine anew", type(self).__name__)
            paged.engine = paged.rebuild(self)  # the old one ends with the last call that runs on it
            paged.seen = now
            return None

    # --- the module, loaded when it is needed --------------------------------------------------------------------

    def _plainly(self, reason: str) -> Any:
        logger.warning("generate runs on transformers' own implementation: %s", reason)
        return self._plain()

    def _assistant(self) -> Any:
        if not self._paged.drafts:
            self._paged.drafts = True
            logger.warning(
                "assistant_model runs on transformers' own implementation: its drafts need its cache"
            )
        return self._plain()

    def _plain(self) -> Any:
        """This very model as an object of its own class, without the engine."""
        self._materialise()
        twin = object.__new__(self._paged.base)
        object.__setattr__(twin, "__dict__", self.__dict__)
        return twin

    def _materialise(self) -> None:
        paged = self.__dict__.get("_paged")
        if paged is None or paged.load is None:
            return
        with paged.lock:
            if paged.load is None:
                return
            logger.info(
                "loading the weights of %s as a torch module beside the engine's", type(self).__name__
            )
            load, paged.load = paged.load, None
            try:
                module = load(self.config)  # type: ignore[attr-defined]
            except BaseException:
                paged.load = load
                raise
            for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "config"):
                self.__dict__[name] = module.__dict__[name]
            paged.seen = fingerprint(self)  # type: ignore[arg-type]

    @property
    def _pending(self) -> bool:
        paged = self.__dict__.get("_paged")
        return paged is not None and paged.load is not None

    def __getattr__(self, name: str) -> Any:
        if self._pending and (name in self.__dict__["_modules"] or name in self.__dict__["_parameters"]):
            self._materialise()
        return super().__getattr__(name)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._materialise()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self._materialise()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def named_children(self) -> Any:
        self._materialise()
        return super().named_children()  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._materialise()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._materialise()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        return self if self._pending and not mode else super().train(mode)  # type: ignore[misc]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self._pending:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            if dtype is None and (device is None or device.type == "cpu"):
                return self
        return super().to(*args, **kwargs)  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._pending else super().device  # type: ignore[misc]

    @property
    def dtype(self) -> torch.dtype:
        known = self.config.dtype if self._pending else None  # type: ignore[attr-defined]
        return known if isinstance(known, torch.dtype) else super().dtype  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle of it is a plain transformers model: an engine cannot be copied."""
        self._materialise()
        state = {name: value for name, value in self.__dict__.items() if name != "_paged"}
        return _blank, (self._paged.base,), state


def _blank(base: type) -> Any:
    return base.__new__(base)


def paged_class(base: type) -> type:
    """A subclass of a transformers model class that has :class:`PagedGeneration` in front, and looks like ``base``."""
    return type(
        base.__name__, (PagedGeneration, base), {"__module__": base.__module__, "__doc__": base.__doc__}
    )
