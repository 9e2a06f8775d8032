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


def read_corpus(path: Path, held_out: float) -> tuple[str, str]:
    """Split the text at a line end; ``held_out`` (0 to 1) is the second part's share of it."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    cut = text.index("\n", int(len(text) * (1.0 - held_out))) + 1
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


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Return a step's learning rate: up to ``peak`` in a line, then a cosine down to 2 % of it.

    Args:
        step: counted from 0.
        steps: of the whole training; the lowest rate is at this one.
        peak: the highest rate.
        warmup: steps on the way to it.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.49 * (1.0 + math.cos(math.pi * done)))


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int = 512) -> float:
    """Cross-entropy over ``tokens`` [num_tokens] in rows of ``length``, in nats per token."""
    rows = tokens[: len(tokens) // length * length].view(-1, length).to(model.device)
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(8)]
    return float(sum(losses) / len(rows))


def train(
    model: LlamaForCausalLM,
    seen: torch.Tensor,
    unseen: torch.Tensor,
    sample: Callable[[], str],
    args: argparse.Namespace,
) -> None:
    """Train in place on ``seen`` [num_tokens], printing losses and ``sample()`` as it goes.

    The last ``args.long`` share of the steps runs at the full context length, the rest at 256.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    rng = torch.Generator().manual_seed(args.seed)
    started, running = time.monotonic(), 0.0
    for step in range(args.steps):
        length = MAX_POSITIONS if step >= args.steps * (1.0 - args.long) else 256
        starts = torch.randint(len(seen) - length, (args.batch_tokens // length, 1), generator=rng)
        rows = seen[starts + torch.arange(length)].to(model.device)
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps, args.lr)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            mean, running = running / (step % args.log_every + 1), 0.0
            print(
                f"step {step + 1:5d}  train {mean:.3f}  held-out {mean_loss(model, unseen):.3f} "
                f"nats/token  {time.monotonic() - started:5.0f} s\n    {sample()}",
                flush=True,
            )


def cut_prompts(text: str, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> list[str]:
    """Cut ``count`` prompts of 30 to 120 tokens from ``text``, each from a sentence's first word.

    The first ``DEMO_PROMPTS`` are short, start a paragraph and hold no dialogue.
    """
    rng = random.Random(seed)
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
    return chosen + rng.sample(others, count - DEMO_PROMPTS)


def main() -> None:
    """Train, then write the model, its tokenizer and the prompts."""
    parser = argparse.ArgumentParser(description="train the demo model of kvtxn")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.txt.gz")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder for the model")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json")
    parser.add_argument("--held-out", type=float, default=0.04, help="share of the text, 0 to 1")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--long", type=float, default=0.15, help="share of steps at full context")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--log-every", type=int, default=500, help="steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where to train: cpu, or a CUDA device")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    seen_text, unseen_text = read_corpus(args.corpus, args.held_out)
    tokenizer = train_tokenizer(seen_text)
    seen, unseen = encode(seen_text, tokenizer), encode(unseen_text, tokenizer)
    prompts = cut_prompts(unseen_text, tokenizer, NUM_PROMPTS, args.seed)
    model = build_model().to(args.device)
    print(f"{model.num_parameters():,} parameters, {len(seen):,} + {len(unseen):,} tokens")

    def sample() -> str:
        ids = tokenizer(prompts[0], return_tensors="pt").input_ids.to(args.device)
        return repr(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0, ids.shape[1] :]))

    train(model, seen, unseen, sample, args)

    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    config = args.out / "tokenizer_config.json"  # put the class name that transformers 4 knows too
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    args.prompts.write_text(json.dumps(prompts, indent=1) + "\n")
    print(f"bfloat16: held-out {mean_loss(model.float(), unseen):.3f} nats/token")


if __name__ == "__main__":
    main()
