"""transformers' `generate` (torch, sdpa attention, dynamic cache); it returns no supports."""

import torch
import transformers
from generate_case import Case


class Rival:
    def __init__(self, folder: str, max_length: int, with_logprobs: bool = True):
        """Log-probabilities of the drawn tokens come the documented way: all scores kept, then normalised."""
        self.with_logprobs = with_logprobs
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Nothing of the model's own defaults: no end, no penalties.
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    @torch.no_grad()
    def run(self, case: Case) -> dict[str, list]:
        ids = torch.tensor(case.prompts)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=case.max_new_tokens,
            temperature=case.temperature,
            top_k=case.top_k,
            top_p=case.top_p,
            return_dict_in_generate=True,
            output_scores=self.with_logprobs,
        )
        logprobs = []
        if self.with_logprobs:
            scores = self.model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
            logprobs = scores.tolist()
        return {"token_ids": found.sequences[:, case.prompt_length :].tolist(), "logprobs": logprobs}

    @torch.no_grad()
    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        logprobs = self.model(ids[None]).logits[0, :-1].log_softmax(dim=-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()
