"""TRL's `GRPOTrainer` on transformers' `generate`; the loss is over the whole vocabulary."""

import tempfile
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from generate_case import Case
from grpo_case import CLIP, LEARNING_RATE, Rewards
from process_memory import Measured
from stepping import Stepper

MAX_STEPS = 1_000


class Rival(Measured):
    def __init__(self, folder: str, max_length: int, *, case: dict[str, Any], group_size: int):
        """Everything that is not rollout or update is off: saving, reports, checkpointing of activations, clipping."""
        super().__init__()
        self.case = Case.from_plain(case)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        vocab_size = self.model.config.vocab_size
        self.rewards = Rewards(vocab_size)
        # A thousand names of batches, so that no epoch ends.
        texts = [" ".join(map(str, ids)) for ids in self.case.prompts]
        rows = datasets.Dataset.from_dict({"prompt": texts * MAX_STEPS})
        self.output = tempfile.TemporaryDirectory()
        config = trl.GRPOConfig(
            output_dir=self.output.name,
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            max_steps=MAX_STEPS,
            per_device_train_batch_size=self.case.num_rows * group_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=group_size,
            max_completion_length=self.case.max_new_tokens,
            temperature=self.case.temperature,
            top_k=self.case.top_k,
            top_p=self.case.top_p,
            beta=0.0,
            epsilon=CLIP,
            loss_type="grpo",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=self.model,
            reward_funcs=self._reward,
            args=config,
            train_dataset=rows,
            processing_class=id_tokenizer(vocab_size),
        )
        self.stepper = Stepper(trainer.train)
        trainer.add_callback(Waits(self.stepper))

    def token_logprobs(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            logprobs = self.model(ids[None]).logits[0, :-1].log_softmax(dim=-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()

    def step(self) -> dict[str, float]:
        self.rewards.begin()
        self.stepper.step()
        return self.rewards.told()

    def _reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return self.rewards(completion_ids)


class Waits(transformers.TrainerCallback):
    def __init__(self, stepper: Stepper):
        self.stepper = stepper

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.stepper.wait()


def id_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Ids as text; its end and its padding lie beyond the model's ids, so no completion ends early."""
    vocabulary = {str(token_id): token_id for token_id in range(vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
