#!/usr/bin/env bash
# lm_eval 0.4.13: HFLM gives a request another score where another request of the same call has the same tokens, divided
# otherwise into context and answer. Its cache of logits (logits_cache=True, the default) takes requests with the same
# context and answer without the last token for one, and reads the answer's tokens of all from the logits at the places
# of one of them. That happens between tasks of one simple_evaluate, and within a task. logits_cache=False is right.
#
# Output on 29 November 2026:
#   lm_eval 0.4.13
#   logits_cache=True: -11.8449 -8.2774 right: -7.8596 -8.2774
#   logits_cache=False: -7.8596 -8.2774 right: -7.8596 -8.2774
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "lm_eval[hf]==0.4.13" torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2> "$folder/log" <<'END' || { cat "$folder/log"; exit 1; }
import torch
from importlib.metadata import version
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("lm_eval", version("lm_eval"))
words = Tokenizer(models.WordLevel({"<eos>": 0, **{str(n): n for n in range(1, 32)}}, unk_token="<eos>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, initializer_range=1.0)
model = LlamaForCausalLM(config).float().eval()
requests = [(("", ""), [5, 6, 7], [8]), (("", ""), [5, 6], [7, 8])]
with torch.no_grad():
    rows = model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
right = [float(rows[2, 8]), float(rows[1, 7] + rows[2, 8])]
found = {}
for cache in (True, False):
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1, logits_cache=cache)
    found[cache] = [score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
    print(f"logits_cache={cache}:", *(f"{score:.4f}" for score in found[cache]), "right:", *(f"{score:.4f}" for score in right))
near = lambda a, b: all(abs(x - y) < 1e-3 for x, y in zip(a, b))
assert near(found[False], right), "also without the cache"
assert not near(found[True], right), "the behaviour has changed"
END
