"""Train the demo model: a byte-level BPE tokenizer and a tiny Llama, from ``corpus.txt.gz``.

    python train.py --device cuda

A seed fixes tokenizer, prompts and batches; weights also depend on the device, its rounding and the
library versions. The last part of the text is held out from all training; prompts come from it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
MAX_POSITIONS = 1024
VOCABULARY = 2048
NUM_PROMPTS, DEMO_PROMPTS = 240, 8  # the demo prompts come first
HELD_OUT = 0.04  # share of the text
#: Steps, tokens per step, the share of steps at full context, steps between two lines of output.
STEPS, BATCH_TOKENS, LONG, LOG_EVERY = 4000, 2048, 0.15, 500
#: The peak learning rate, and the steps until it is reached.
PEAK, WARM_UP = 3e-3, 100
SEED = 0


def read_corpus() -> tuple[str, str]:
    """Return the corpus cut in two at a line's end; the second part's share is ``HELD_OUT``."""
    text = gzip.decompress((HERE / "corpus.txt.gz").read_bytes()).decode("utf-8")
    cut = text.index("\n", int(len(text) * (1.0 - HELD_OUT))) + 1
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``VOCABULARY`` entries; no token is added around a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(text: str, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Encode ``text`` line by line: int64 [num_tokens]."""
    lines = tokenizer(text.splitlines(keepends=True), verbose=False).input_ids
    return torch.tensor([token for line in lines for token in line])


def build_model() -> LlamaForCausalLM:
    """Build the untrained model: 4 query heads over 2 key/value heads of 64, tied embeddings."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            **ends,
        )
    )
    model.generation_config = GenerationConfig(**ends)
    return model


def learning_rate(step: int) -> float:
    """Return a step's learning rate: up to ``PEAK`` in a line, then a cosine down to 2 % of it.

    Args:
        step: counted from 0; the lowest rate is at the last one of the training.
    """
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return PEAK * (0.02 + 0.49 * (1.0 + math.cos(math.pi * done)))


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean cross-entropy over ``tokens`` [num_tokens] in rows of 512, in nats per token.

    Tokens behind the last whole row are left out.
    """
    rows = tokens[: len(tokens) // 512 * 512].view(-1, 512).to(model.device)
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(8)]
    return float(sum(losses) / len(rows))


def train(
    model: LlamaForCausalLM,
    seen: torch.Tensor,
    unseen: torch.Tensor,
    sample: Callable[[], str],
) -> None:
    """Train in place on ``seen`` [num_tokens], printing losses and ``sample()`` as it goes.

    The last ``LONG`` share of the steps runs at the full context length, the rest at 256.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    rng = torch.Generator().manual_seed(SEED)
    started, running = time.monotonic(), 0.0
    for step in range(STEPS):
        length = MAX_POSITIONS if step >= STEPS * (1.0 - LONG) else 256
        starts = torch.randint(len(seen) - length, (BATCH_TOKENS // length, 1), generator=rng)
        rows = seen[starts + torch.arange(length)].to(model.device)
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == STEPS:
            mean, running = running / (step % LOG_EVERY + 1), 0.0
            print(
                f"step {step + 1:5d}  train {mean:.3f}  held-out {mean_loss(model, unseen):.3f} "
                f"nats/token  {time.monotonic() - started:5.0f} s\n    {sample()}",
                flush=True,
            )


def cut_prompts(text: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return ``NUM_PROMPTS`` random prompts of 30 to 120 tokens, each from a sentence's first word.

    The first ``DEMO_PROMPTS`` are short, start a paragraph and hold no dialogue.
    """
    rng = random.Random(SEED)
    demo: list[str] = []
    rest: list[str] = []
    for paragraph in text.splitlines():
        starts = [0, *(m.end() for m in re.finditer(r"(?<!Mr)(?<!Mrs)[.!?] (?=[A-Z])", paragraph))]
        for start in starts[::4]:
            sentence = paragraph[start:]
            is_demo = start == 0 and paragraph[0].isalpha() and rng.random() < 0.5
            size = rng.randint(32, 44) if is_demo else rng.randint(32, 118)
            ids = tokenizer.encode(sentence)[:size]
            prompt = tokenizer.decode(ids).rsplit(" ", 1)[0]  # the last word may be cut in two
            if 30 <= len(tokenizer.encode(prompt)) <= 120:
                (demo if is_demo and '"' not in prompt else rest).append(prompt)
    chosen = [demo[i * len(demo) // DEMO_PROMPTS] for i in range(DEMO_PROMPTS)]
    others = [prompt for prompt in demo + rest if prompt not in chosen]
    return chosen + rng.sample(others, NUM_PROMPTS - DEMO_PROMPTS)


def main() -> None:
    """Train, then write the model, its tokenizer and the prompts into this file's folder."""
    parser = argparse.ArgumentParser(description="train the demo model of kvtxn")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, or a CUDA device")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    seen_text, unseen_text = read_corpus()
    tokenizer = train_tokenizer(seen_text)
    seen, unseen = encode(seen_text, tokenizer), encode(unseen_text, tokenizer)
    prompts = cut_prompts(unseen_text, tokenizer)
    model = build_model().to(args.device)
    print(f"{model.num_parameters():,} parameters, {len(seen):,} + {len(unseen):,} tokens")

    def sample() -> str:
        ids = tokenizer(prompts[0], return_tensors="pt").input_ids.to(args.device)
        return repr(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0, ids.shape[1] :]))

    train(model, seen, unseen, sample)

    model.to(torch.bfloat16).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")
    config = (
        HERE / "model" / "tokenizer_config.json"
    )  # put the class name that transformers 4 knows too
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    (HERE / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    print(f"bfloat16: held-out {mean_loss(model.float(), unseen):.3f} nats/token")


if __name__ == "__main__":
    main()
