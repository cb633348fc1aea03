"""What people write without this package: load, apply the chat template, `generate` one padded batch, write JSON lines.

    python plain_script.py INPUT OUTPUT MODEL_DIRECTORY MAX_NEW_TOKENS

The yardstick of `startup.py`. It imports nothing of this package.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, target, model_name, max_new_tokens = sys.argv[1:]
    with open(source) as file:
        rows = [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")  # [num_rows, longest]
    with torch.inference_mode():
        outputs = model.generate(**batch, max_new_tokens=int(max_new_tokens), do_sample=False)
    completions = tokenizer.batch_decode(outputs[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    with open(target, "w") as file:
        for row, completion in zip(rows, completions, strict=True):
            file.write(json.dumps({**row, "completion": completion}) + "\n")


if __name__ == "__main__":
    main()
