"""What transformers says: greedy output by generate(), and log-probabilities."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

MIN_GAP = 1e-3
"""Between the two best logits at every position: far above what rounding in float32 changes."""


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    gap: float
    """The smallest distance between the two best logits at any position."""
    logprobs: torch.Tensor
    """[output token, vocabulary], float32."""
    prompt_logprobs: torch.Tensor
    """[prompt token but the first, vocabulary], float32."""


class Reference:
    """A model of transformers, asked one prompt at a time. No end of sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        self._vocabulary = model.config.get_text_config().vocab_size

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> Answer:
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([prompt])
        result = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = result.sequences[0, len(prompt) :].tolist()
        assert len(tokens) == count
        logits = torch.cat(result.logits)
        best = logits.topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        whole = self._model(ids).logits[0, :-1].log_softmax(-1)
        return Answer(prompt, tokens, gap, logits.log_softmax(-1), whole)

    def answers(self, lengths: list[int], count: int, seed: int = 0) -> list[Answer]:
        """Random prompts of these lengths whose greedy output of `count` tokens rounding cannot change."""
        rng = random.Random(seed)
        answers = []
        for length in lengths:
            for _ in range(50):
                prompt = [rng.randrange(self._vocabulary) for _ in range(length)]
                answer = self.greedy(prompt, count)
                if answer.gap > MIN_GAP:
                    break
            assert answer.gap > MIN_GAP
            answers.append(answer)
        return answers
