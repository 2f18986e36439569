#!/usr/bin/env bash
# transformers 5.24.0: a tokenizer that PreTrainedTokenizerFast.save_pretrained wrote is read back by AutoTokenizer with
# other tokens, without a warning, if the folder has a config.json of qwen2. tokenizer_config.json names the class that
# takes tokenizer.json as it is, but the model type counts: Qwen2Tokenizer takes the vocabulary from the file, and
# replaces its pre-tokenizer (here: numbers of three digits) and its normalizer.
#
# Output on 29 November 2026:
#   transformers 5.24.0
#   saved as TokenizersBackend: ['345', 'Ġ', 'in']
#   read as Qwen2Tokenizer: ['3', '4', '5', 'Ġ', 'in']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'EOF'
import json, sys
from pathlib import Path
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print("transformers", transformers.__version__)
tokenizer = Tokenizer(models.BPE())
split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
    show_progress=False,
)
tokenizer.train_from_iterator(["345 in 2024 the 345 and 345"] * 50, trainer)
saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
folder = Path(sys.argv[1]) / "model"
saved.save_pretrained(folder)
(folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
read = AutoTokenizer.from_pretrained(folder)
print(f"saved as {type(saved).__name__}: {saved.tokenize('345 in')}")
print(f"read as {type(read).__name__}: {read.tokenize('345 in')}")
assert saved.tokenize("345 in") != read.tokenize("345 in"), "the behaviour has changed"
EOF
