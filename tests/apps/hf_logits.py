"""Logits of a folder by `transformers`: `python hf_logits.py FOLDER IN.npz OUT.npz`, in an environment with torch."""

import sys

import numpy as np
import torch
import transformers


def main(folder: str, source: str, target: str) -> None:
    """Reads tokens (B, L) and a prompt, writes logits (B, L, V) and the 5 likeliest tokens after the prompt."""
    given = np.load(source)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(torch.tensor(given["tokens"])).logits.numpy()
        prompt = torch.tensor(given["prompt"])[None]
        greedy = model.generate(prompt, **how)[0, prompt.shape[1] :].numpy()
    np.savez(target, logits=logits, greedy=greedy)


if __name__ == "__main__":
    main(*sys.argv[1:])
