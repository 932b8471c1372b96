"""A tokenizer that is made in a second: byte-level BPE of some hundred tokens, and its template."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

TEXT = [
    "The quick brown fox jumps over the lazy dog, isn't it? 12345 67 890.",
    "def f(x):\n    return {'a': [1, 2.5], \"b\": x**2}\n",
    "Größe, façade, naïve. Съешь ещё этих мягких французских булок.",
    "我能吞下玻璃而不伤身体。こんにちは、世界！",
] * 20
WORDS = r"'s|'t|'re| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% for call in message.tool_calls %}
{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make(folder, *, template=TEMPLATE, strips=False, words=WORDS, begins=True):
    """Write the files of a model to `folder`. `strips`: a special token takes blanks with it.
    `begins`: it puts one before each prompt.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(text, lstrip=strips) for text in SPECIAL])
    begin = tokenizer.token_to_id(SPECIAL[0])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], begin)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[2]}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
