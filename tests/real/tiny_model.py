"""Write the files of a model of two layers whose tokens are bytes: `python tiny_model.py FOLDER`.

Run by the Python that has vLLM, whose `tokenizers` it uses. There are no weights: vLLM draws them.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BEGIN, END = "<s>", "</s>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENS_MAX = 8192


def write(folder: Path) -> None:
    vocabulary = {
        byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocabulary |= {BEGIN: len(vocabulary), END: len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "model_max_length": TOKENS_MAX,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": TOKENS_MAX,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": vocabulary[BEGIN],
        "eos_token_id": vocabulary[END],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(model))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
