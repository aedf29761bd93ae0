"""Make small random checkpoints with transformers, and the logits it computes from their bfloat16 weights.

    python tests/data/make_tiny_models.py

needs torch and transformers, which the tests do not. Each folder holds what no other checkpoint here has: layers
without rotary positions, a window that every layer has, and Gemma 3 with soft-caps and stretched wavelengths.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

transformers.logging.disable_progress_bar()
HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOCAL, WHOLE = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
CONFIGS = {
    "tiny_smollm3_nope": transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=True),
    "tiny_mistral_window": transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=8),
    "tiny_gemma3_caps": transformers.Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"sliding_attention": LOCAL, "full_attention": WHOLE},
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
}
LENGTHS = (40, 17, 1)
GAIN = 4.0  # of the initial weights: those of a new model give almost the same logits everywhere


def make(name: str, config: transformers.PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.0
            parameter.copy_(parameter * (1.0 if parameter.ndim == 1 else GAIN) + noise)
    folder = HERE / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    # Read again: the conversion above has rounded the rotary frequencies too.
    source = transformers.AutoModelForCausalLM
    model = source.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    input_ids = torch.from_numpy(np.random.default_rng(0).integers(3, config.vocab_size, (len(LENGTHS), LENGTHS[0])))
    mask = torch.arange(LENGTHS[0])[None] < torch.tensor(LENGTHS)[:, None]
    # transformers 5.24 reads Gemma 3's soft-cap of the scores, but does not hand it to its own attention.
    cap = getattr(config, "attn_logit_softcapping", None)
    more = {} if cap is None else {"softcap": cap}
    with torch.no_grad():
        logits = model(torch.where(mask, input_ids, 0), attention_mask=mask.long(), **more).logits
    recorded = {"input_ids": input_ids.numpy().astype(np.int32), "lengths": np.array(LENGTHS, np.int32)}
    np.savez_compressed(folder / "reference.npz", **recorded, logits=logits.numpy())
    print(name, "largest logit", float(logits.abs().max()), "spread", float(logits.std()))


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        make(name, config)
