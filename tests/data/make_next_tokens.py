"""Record the likeliest next tokens of real models, as transformers computes them in float32 from their GGUF files.

    python tests/data/make_next_tokens.py SMOLLM2.gguf GEMMA.gguf

needs torch, transformers, accelerate and gguf, which the tests do not. Both read the weights as they are expanded from
the file, so differences are those of the arithmetic alone.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
NUM_TOKENS = 200
TEXT = """The old mill stood at the edge of the river, where the road from the village turned toward the hills. For many
years nobody had lived there, and the great wheel, which had once driven three pairs of stones, hung broken above the
water. In the spring the children came to look for frogs under the bridge, and in the autumn the farmers stored their
hay in the upper rooms. One evening a woman with a small suitcase walked down the road and asked the first man she met
who owned the place. He told her that it belonged to the town, that the roof let in the rain, and that she would be
better off looking for a house somewhere else. She thanked him, went to the mayor the next morning, and bought the mill
for less than the price of a good horse. By the end of the summer the roof was whole again, and smoke rose from the
chimney. She planted beans and apple trees, kept a few hens, and taught the younger children to read. When somebody
asked her why she had come, she said that she had always wanted to hear water while she slept.""".replace("\n", " ")


def record(path: Path, add_bos: bool) -> dict[str, np.ndarray]:
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    token_ids = [tokenizer.bos_token_id] * add_bos + token_ids
    assert len(token_ids) >= NUM_TOKENS, len(token_ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids[:NUM_TOKENS]])).logits[0]
    best = logits.topk(2)
    gaps = (best.values[:, 0] - best.values[:, 1]).numpy()
    next_ids = best.indices[:, 0].numpy()
    is_next = next_ids[:-1] == np.array(token_ids[1:NUM_TOKENS])
    print(path.name, token_ids[:8], f"smallest gap {gaps.min():.2g}, the text goes on so in {is_next.mean():.0%}")
    return {
        "token_ids": np.array(token_ids[:NUM_TOKENS], np.int32),
        "next_ids": next_ids.astype(np.int32),
        "gaps": gaps.astype(np.float32),
    }


def main(smollm2: str, gemma: str) -> None:
    recorded = {"smollm2": record(Path(smollm2), add_bos=False), "gemma3": record(Path(gemma), add_bos=True)}
    arrays = {f"{model}_{name}": array for model, parts in recorded.items() for name, array in parts.items()}
    np.savez_compressed(HERE / "next_tokens.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
