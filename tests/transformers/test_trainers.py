"""Other trainers than transformers' own, and what may be done to a model: the same on all ranks, as in one process."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses, models
from tokenizers import Tokenizer, models as token_models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from accelerate_join.transformers import JoinTrainerMixin
from tests.support.accelerated import accelerator_of
from tests.support.workers import Workers

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
    return kind(GPT2Config(**sizes, **drops, pad_token_id=0, eos_token_id=1, bos_token_id=1, **options))


def text(number: int) -> str:
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(3, 9, (), generator=generator))
    return " ".join(WORDS[3 + int(torch.randint(7, (), generator=generator))] for _ in range(length))
