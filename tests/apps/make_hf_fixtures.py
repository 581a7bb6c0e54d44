"""Makes tests/apps/hf/: tiny random models of `transformers`, and their outputs.

Run it in an environment with torch and transformers: `python tests/apps/make_hf_fixtures.py`. The recorded fixtures
are from torch 2.13.0 on CPU and transformers 5.24.0.
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "hf"
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {"vocab_size": 260, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
LLAMA = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
MODELS = {
    "gpt2": transformers.GPT2Config(**GPT2, bos_token_id=3, eos_token_id=[5, 7]),
    "llama": transformers.LlamaConfig(
        **LLAMA,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=LLAMA_3,
        rms_norm_eps=1e-5,
    ),
    "llama_tied": transformers.LlamaConfig(
        **LLAMA,
        intermediate_size=14,
        num_attention_heads=2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
PROMPT = [7, 200, 31, 4]


def main() -> None:
    """Writes a folder for each model: config.json, model.safetensors and expected.npz."""
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():  # no bias is 0, no scale 1, attention is not uniform
                size = 0.7 if "h." in path or "layers." in path else 0.2
                parameter.copy_(torch.randn_like(parameter) * size + (1.0 if parameter.ndim == 1 else 0.0))
            tokens = torch.randint(0, config.vocab_size, (2, 12))
            logits = model(tokens).logits
            how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            greedy = model.generate(torch.tensor([PROMPT]), **how)[0, len(PROMPT) :]
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
        expected = {"tokens": tokens.numpy(), "logits": logits.numpy(), "greedy": greedy.numpy()}
        np.savez_compressed(HERE / name / "expected.npz", **expected)


if __name__ == "__main__":
    main()
