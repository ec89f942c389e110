"""A small language, and models and arguments for it."""

from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainingArguments

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "d", "e", "f", "g"]


def tokenizer() -> Any:
    words = Tokenizer(token_models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=16
    )


def gpt(kind: Any = GPT2LMHeadModel, **options: Any) -> Any:
    torch.manual_seed(2)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 32, "vocab_size": len(WORDS)}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return kind(GPT2Config(**sizes, **drops, pad_token_id=0, eos_token_id=1, bos_token_id=1, **options)).double()


def text(number: int) -> str:
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(3, 9, (), generator=generator))
    return " ".join(WORDS[3 + int(torch.randint(7, (), generator=generator))] for _ in range(length))


def count_labels(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def options_of(folder: str, kind: Any = TrainingArguments, **options: Any) -> Any:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam makes much of gradients that are 0 but for rounding
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    return kind(output_dir=folder, **{**common, **options})
