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
    """A model of transformers. No end of sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        self._vocabulary = model.config.get_text_config().vocab_size
        # Its scores grow with the place in the padded row, and its chunks begin there.
        self._batches = model.config.model_type != "llama4_text"

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], count: int) -> torch.Tensor:
        """The logits of each output token: float32 [prompt, output token, vocabulary]. A batch takes little
        longer than one of its prompts."""
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        if len(prompts) > 1 and not self._batches:
            return torch.cat([self.greedy([prompt], count) for prompt in prompts])
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[at >= longest - len(prompt) for at in range(longest)] for prompt in prompts])
        result = self._model.generate(ids, attention_mask=seen.long(), generation_config=config)
        logits = torch.stack(result.logits, 1)
        assert torch.equal(logits.argmax(-1), result.sequences[:, longest:])
        return logits

    @torch.inference_mode()
    def answers(self, lengths: list[int], count: int, seed: int = 0) -> list[Answer]:
        """Random prompts of these lengths whose greedy output of `count` tokens rounding cannot change."""
        rng = random.Random(seed)
        found: dict[int, Answer] = {}
        for _ in range(50):
            left = [at for at in range(len(lengths)) if at not in found]
            if not left:
                return [found[at] for at in range(len(lengths))]
            prompts = [[rng.randrange(self._vocabulary) for _ in range(lengths[at])] for at in left]
            for at, prompt, logits in zip(left, prompts, self.greedy(prompts, count), strict=True):
                best = logits.topk(2).values
                gap = float((best[:, 0] - best[:, 1]).min())
                if gap > MIN_GAP:
                    tokens, border = logits.argmax(-1).tolist(), len(prompt) - 1
                    # By itself, without what fills a batch's rows.
                    whole = self._model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0].log_softmax(-1)
                    assert whole[border:].argmax(-1).tolist() == tokens
                    found[at] = Answer(prompt, tokens, gap, whole[border:], whole[:border])
        raise AssertionError("no such prompts were found")
