"""Writes tiny_llama_peft: adapters of tiny_llama as PEFT itself saves them, and the logits it computes with them.

Needs torch, transformers and peft, which no test needs. Run in this folder.
"""

import json
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

FOLDER = Path("tiny_llama_peft")

torch.manual_seed(0)
base = transformers.AutoModelForCausalLM.from_pretrained("tiny_llama", dtype=torch.float32)
config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"])
model = peft.get_peft_model(base, config).eval()
token_ids = torch.randint(0, base.config.vocab_size, (2, 7))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.3 * torch.randn_like(parameter))
    logits = model(token_ids).logits
model.save_pretrained(FOLDER)
(FOLDER / "README.md").unlink(missing_ok=True)
np.savez(FOLDER / "reference.npz", token_ids=token_ids.numpy(), logits=logits.numpy().astype(np.float32))
path = FOLDER / "adapter_config.json"
path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "tiny_llama"}, indent=2) + "\n")
