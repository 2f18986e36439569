"""A tokenizer of Hugging Face for chats: each byte a token, and four special ones."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def write_chat_tokenizer(folder: Path, template: str | None) -> Path:
    """Write the files of a tokenizer to a folder, and return it.

    Args:
        template: `chat_template`; None for none.
    """
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    names = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    built.add_special_tokens([AddedToken(name, special=True) for name in names])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    built.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({} if template is None else {"chat_template": template}))
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    return folder
