"""generate beside plain options: text that stops it, streams, hooks of the caller, and what it leaves alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)


def greedy(**more: Any) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": 24, "eos_token_id": 2, "pad_token_id": 0, **more}


def same(theirs: Any, ours: Any, **options: Any) -> torch.Tensor:
    expected, got = theirs.generate(**options), ours.generate(**options)
    assert got.tolist() == expected.tolist()
    return got


def pieces(theirs: Any, tokenizer: Any, inputs: Any, count: int = 40) -> str:
    ids = theirs.generate(**inputs, **greedy(max_new_tokens=count))
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=False)


# --- stop strings --------------------------------------------------------------------------------------------------


def test_stop_strings_are_kept_and_stop_where_transformers_stops(
    theirs: Any, ours: Any, tokenizer: Any, encode: Any, said: Any
) -> None:
    inputs = encode("the cat")
    text = pieces(theirs, tokenizer, inputs)
    for start in range(0, 20, 3):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            if stop.isascii() and stop.strip():
                same(
                    theirs,
                    ours,
                    **inputs,
                    **greedy(max_new_tokens=40),
                    stop_strings=[stop, "zzz"],
                    tokenizer=tokenizer,
                )
    assert said() == []


def test_a_stop_string_may_begin_in_the_prompt(
    theirs: Any, ours: Any, tokenizer: Any, encode: Any, said: Any
) -> None:
    inputs = encode("once")
    first = pieces(theirs, tokenizer, inputs, 1)
    ids = same(theirs, ours, **inputs, **greedy(), stop_strings="ce" + first, tokenizer=tokenizer)
    assert ids.shape[1] == inputs["input_ids"].shape[1] + 1
    assert said() == []


def test_stop_strings_in_a_batch(theirs: Any, ours: Any, tokenizer: Any, encode: Any, said: Any) -> None:
    inputs = encode("the cat", "once upon a time", "a")
    text = pieces(theirs, tokenizer, encode("the cat"))
    stops = [piece for piece in (text[3:5], text[6:7]) if piece.isascii()] or ["e"]
    same(theirs, ours, **inputs, **greedy(), stop_strings=stops, tokenizer=tokenizer)
    same(
        theirs,
        ours,
        **inputs,
        **greedy(num_beams=2, max_new_tokens=10),
        stop_strings=stops,
        tokenizer=tokenizer,
    )
    assert said() == []


def test_minimum_length_does_not_hold_back_stop_strings(
    theirs: Any, ours: Any, tokenizer: Any, encode: Any
) -> None:
    inputs = encode("the cat")
    text = pieces(theirs, tokenizer, inputs)
    same(theirs, ours, **inputs, **greedy(min_new_tokens=20), stop_strings=[text[2:4]], tokenizer=tokenizer)


# --- hooks of the caller -------------------------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Pushes a token that depends on everything it is shown."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.long
        assert scores.dtype == torch.float32
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, input_ids.sum(-1) % scores.shape[1]] += 4.0
        return scores


class EndsWith(StoppingCriteria):
    """Returns a plain bool and looks at the first row only, as most criteria in the wild."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool(input_ids[0][-1] == self.token)


def test_hooks_run_on_the_engine_for_one_row(theirs: Any, ours: Any, encode: Any, said: Any) -> None:
    inputs = encode("the cat")
    plain = theirs.generate(**inputs, **greedy())
    criteria = StoppingCriteriaList([EndsWith(int(plain[0, -4]))])
    same(theirs, ours, **inputs, **greedy(), stopping_criteria=criteria)
    processors = LogitsProcessorList([Favour()])
    same(theirs, ours, **inputs, **greedy(repetition_penalty=1.3), logits_processor=processors)
    assert said() == []
    assert ours._pending


def test_hooks_see_the_whole_batch_or_transformers_runs_it(
    theirs: Any, ours: Any, encode: Any, said: Any
) -> None:
    inputs = encode("the cat", "a hat")
    same(theirs, ours, **inputs, **greedy(), logits_processor=LogitsProcessorList([Favour()]))
    assert len(said()) == 1
    assert "Favour" in said()[0]


def test_transformers_own_processors_given_by_hand_run_on_the_engine(
    theirs: Any, ours: Any, encode: Any, said: Any
) -> None:
    inputs = encode("the cat", "a hat")
    length = inputs["input_ids"].shape[1]
    for ignored in (None, 1, length):
        processors = LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=ignored)]
        )
        same(theirs, ours, **inputs, **greedy(), logits_processor=processors)
    assert said() == []
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.6, torch.tensor([1, length]))])
    same(theirs, ours, **inputs, **greedy(), logits_processor=processors)
    assert len(said()) == 1


def test_a_criterion_may_read_the_scores(theirs: Any, ours: Any, encode: Any, said: Any) -> None:
    seen: list[int] = []

    class Counts(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(len(scores))
            return torch.tensor([len(scores) >= 5])

    out = ours.generate(
        **encode("the cat"),
        **greedy(return_dict_in_generate=True, output_scores=True),
        stopping_criteria=StoppingCriteriaList([Counts()]),
    )
    assert seen == [1, 2, 3, 4, 5]
    assert len(out.scores) == 5
    assert said() == []


def test_a_hook_that_fails_fails_its_call_only(ours: Any, encode: Any) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(Exception, match="mine"):
        ours.generate(**encode("the cat"), **greedy(), logits_processor=LogitsProcessorList([Broken()]))
    assert ours.generate(**encode("the cat"), **greedy()).shape[0] == 1


def test_max_time_ends_it(ours: Any, encode: Any, said: Any) -> None:
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            scores[:, 2] = -float("inf")
            return scores

    inputs = encode("the cat")
    ids = ours.generate(
        **inputs, **greedy(max_new_tokens=200), max_time=0.2, logits_processor=LogitsProcessorList([Slow()])
    )
    assert 1 <= ids.shape[1] - inputs["input_ids"].shape[1] < 150
    assert said() == []


# --- streams -------------------------------------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ended == 0
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_then_each_token(theirs: Any, ours: Any, encode: Any, said: Any) -> None:
    logs = []
    for model in (theirs, ours):
        logs.append(Log())
        model.generate(**encode("the cat"), **greedy(), streamer=logs[-1])
    assert logs[0].puts == logs[1].puts
    assert logs[1].ended == 1
    assert said() == []


def test_a_text_iterator_streamer_in_a_thread(ours: Any, theirs: Any, tokenizer: Any, encode: Any) -> None:
    inputs = encode("once upon")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=ours.generate, kwargs={**inputs, **greedy(), "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == pieces(theirs, tokenizer, inputs, 24)


def test_a_streamer_is_ended_when_the_call_fails(ours: Any, encode: Any) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    log = Log()
    with pytest.raises(Exception, match="mine"):
        ours.generate(
            **encode("a"), **greedy(), streamer=log, logits_processor=LogitsProcessorList([Broken()])
        )
    assert log.ended == 1


# --- what transformers does itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2, "do_sample": True}, "beams that are sampled"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attentions"),
        ({"num_beams": 2, "output_scores": True, "return_dict_in_generate": True}, "beam search"),
        ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
        ({"max_new_tokens": 300, "eos_token_id": None}, "context"),
    ],
)
def test_the_rest_falls_back_and_is_said(
    options: dict[str, Any], reason: str, theirs: Any, ours: Any, encode: Any, said: Any
) -> None:
    inputs, options = encode("the cat"), greedy(**options)
    torch.manual_seed(3)
    expected = theirs.generate(**inputs, **options)
    torch.manual_seed(3)
    got = ours.generate(**inputs, **options)
    if not isinstance(got, torch.Tensor):
        assert type(got) is type(expected)
        got, expected = got.sequences, expected.sequences
    assert got.tolist() == expected.tolist()
    assert len(said()) == 1
    assert reason in said()[0]


def test_embeddings_caches_positions_and_right_padding_fall_back(
    theirs: Any, ours: Any, encode: Any, said: Any
) -> None:
    inputs = encode("the cat")
    embeds = theirs.get_input_embeddings()(inputs["input_ids"]).detach()
    same(theirs, ours, inputs_embeds=embeds, **greedy())
    for model in (theirs, ours):
        model.generate(**inputs, **greedy(), cache=DynamicCache(config=model.config))
    positions = torch.arange(5, 5 + inputs["input_ids"].shape[1])[None]
    same(theirs, ours, **inputs, **greedy(), position_ids=positions)
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -1] = 0
    same(theirs, ours, input_ids=inputs["input_ids"], attention_mask=mask, **greedy())
    assert len(said()) == 4


def test_assisted_and_custom_decoding_are_transformers_own(
    theirs: Any, ours: Any, encode: Any, said: Any
) -> None:
    inputs = encode("the cat")
    same(theirs, ours, **inputs, **greedy(), assistant_model=theirs)

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids + 1

    same(theirs, ours, **inputs, **greedy(), custom_generate=loop)
    same(theirs, ours, **inputs, **greedy(prompt_lookup_num_tokens=2))
    for options in ({"assistant_model": theirs}, {"custom_generate": loop}):
        got = ours.submit(**inputs, **greedy(), **options).result()
        assert got.tolist() == theirs.generate(**inputs, **greedy(), **options).tolist()
    assert len(said()) == 5


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}])
def test_a_paged_model_drafts_for_another_one(
    theirs: Any, ours: Any, encode: Any, said: Any, options: dict[str, Any]
) -> None:
    inputs = encode("the cat")
    results = []
    for model, assistant in ((theirs, theirs), (theirs, ours), (ours, ours), (ours, theirs)):
        torch.manual_seed(3)
        call = model.generate(**inputs, **greedy(**options), assistant_model=assistant)
        results.append(call.tolist())
    assert results == results[:1] * 4
    assert sum("its drafts need its cache" in line for line in said()) == 1


def test_a_model_in_training_mode_falls_back(ours: Any, encode: Any, said: Any) -> None:
    ours.train()
    ours.generate(**encode("the cat"), **greedy())
    assert "training" in said()[0]
    ours.eval()
    ours.generate(**encode("the cat"), **greedy())
    assert len(said()) == 1


def test_paged_cache_implementation_is_what_we_do(theirs: Any, ours: Any, encode: Any, said: Any) -> None:
    inputs = encode("the cat", "once upon a")
    got = ours.generate(**inputs, **greedy(), cache_implementation="paged")
    assert got.tolist() == theirs.generate(**inputs, **greedy()).tolist()
    assert said() == []


def test_old_argument_names_still_work(ours: Any, encode: Any, said: Any) -> None:
    ours.generate(**encode("the cat"), **greedy(), past_key_values=None)
    assert said() == []


# --- many calls at once --------------------------------------------------------------------------------------------


def test_calls_from_many_threads_share_a_batch(theirs: Any, ours: Any, encode: Any) -> None:
    texts = [f"the cat {i} and" for i in range(12)]
    results: dict[str, Any] = {}

    def work(text: str) -> None:
        results[text] = ours.generate(**encode(text), **greedy()).tolist()

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text in texts:
        assert results[text] == theirs.generate(**encode(text), **greedy()).tolist()


def test_submit_does_not_wait(theirs: Any, ours: Any, encode: Any) -> None:
    texts = ["the cat", "a hat and", "once"]
    pending = [ours.submit(**encode(text), **greedy()) for text in texts]
    for text, call in zip(texts, pending):
        assert call.result().tolist() == theirs.generate(**encode(text), **greedy()).tolist()


def test_generate_batch(theirs: Any, ours: Any, tokenizer: Any, said: Any) -> None:
    prompts = [tokenizer(text)["input_ids"] for text in ("the cat", "once upon a time", "hat")]
    out = ours.generate_batch(prompts, **greedy(repetition_penalty=1.5))
    assert list(out) == ["req_0", "req_1", "req_2"]
    for prompt, result in zip(prompts, out.values()):
        expected = theirs.generate(torch.tensor([prompt]), **greedy(repetition_penalty=1.5))
        assert result.prompt_ids == prompt
        assert result.generated_tokens == expected[0, len(prompt) :].tolist()
        assert result.error is None
        assert result.is_finished()
    again = ours.generate_batch(prompts, **greedy(repetition_penalty=1.5))
    assert [r.generated_tokens for r in again.values()] == [r.generated_tokens for r in out.values()]
    assert said() == []


def test_a_bad_prompt_in_generate_batch_fails_alone(ours: Any, tokenizer: Any) -> None:
    good = tokenizer("the cat")["input_ids"]
    out = ours.generate_batch([[], good, [10**6], good], **greedy())
    assert "empty" in out["req_0"].error
    assert "vocabulary" in out["req_2"].error
    assert out["req_1"].error is None
    assert out["req_1"].generated_tokens == out["req_3"].generated_tokens != []
    assert ours.generate_batch([]) == {}


def test_samples_in_generate_batch(ours: Any, tokenizer: Any) -> None:
    prompt = tokenizer("the cat")["input_ids"]
    out = ours.generate_batch(
        [prompt], do_sample=True, num_return_sequences=3, max_new_tokens=5, eos_token_id=[]
    )
    assert list(out) == ["req_0", "req_0__child#0", "req_0__child#1"]


@pytest.mark.parametrize(
    "more", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "drawn"]
)
def test_a_default_dtype_or_device_of_the_process_changes_nothing(
    ours: Any, encode: Any, said: Any, more: dict[str, Any]
) -> None:
    inputs = encode("the cat")
    torch.manual_seed(1)
    expected = ours.generate(**inputs, **{**greedy(), **more})
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = ours.generate(**inputs, **{**greedy(), **more})
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert said() == []
