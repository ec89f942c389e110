"""Other trainers than transformers' own, and what may be done to a model: the same on all ranks, as in one process."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorForSeq2Seq,
    GPT2ForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from accelerate_join.transformers import JoinTrainerMixin
from tests.covering import others_long
from tests.needs import known
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.accelerate_sharded import fsdp_on_cpu
from tests.support.front_ends.transformers import FROM_5, LOSS_TOLERANCE, Unions
from tests.support.workers import Workers
from tests.transformers.words import WORDS, count_labels, gpt, options_of, text, tokenizer

try:  # which asks for a newer transformers than some that are tested
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as SentenceArguments
    from sentence_transformers.base.modules import InputModule
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
except ImportError:
    SentenceTransformer = None
    SentenceTransformerTrainer = SentenceArguments = CosineSimilarityLoss = None
    InputModule = torch.nn.Module

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL, which calls what is deprecated
# By the name that this version of transformers has for them.
CHECKPOINTS = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
BY_LENGTH: dict[str, Any] = {"group_by_length": True}
if hasattr(TrainingArguments, "train_sampling_strategy"):
    BY_LENGTH = {"train_sampling_strategy": "group_by_length"}


class Recorded(TrainerCallback):
    """Keeps the batches that a trainer has trained on, by epoch and step."""

    def __init__(self, trainer: Any) -> None:
        self.seen: list[list[Any]] = []
        own = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.model.training and not trainer.joined:
                self.seen[-1].append({n: v.clone() if torch.is_tensor(v) else v for n, v in inputs.items()})
            return own(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append([])


def sft(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    args = options_of(folder, SFTConfig, **{"max_length": 16, CHECKPOINTS: False, **options})
    data = Dataset.from_dict({"text": [text(n) for n in rows]})
    return base(gpt(), args, train_dataset=data, processing_class=tokenizer())


def dpo(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    args = options_of(folder, DPOConfig, max_length=16, **{CHECKPOINTS: False, **options})
    columns = {name: [text(n + plus) for n in rows] for name, plus in (("prompt", 0), ("chosen", 50), ("rejected", 99))}
    return base(
        gpt(), ref_model=gpt(), args=args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer()
    )


def reward(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    args = options_of(folder, RewardConfig, max_length=16, **{CHECKPOINTS: False, **options})
    columns = {name: [text(n + plus) for n in rows] for name, plus in (("chosen", 50), ("rejected", 99))}
    model = gpt(GPT2ForSequenceClassification, num_labels=1)
    return base(model, args=args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer())


def kto(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    # Its mean over all ranks' means is that of all rows where they have equally many.
    order = known(KTOConfig, train_sampling_strategy="sequential")
    args = options_of(folder, KTOConfig, max_length=16, **{CHECKPOINTS: False, **order, **options})
    columns = {
        "prompt": [text(n) for n in rows],
        "completion": [text(n + 50) for n in rows],
        "label": [n % 2 > 0 for n in rows],
    }
    return base(
        gpt(), ref_model=gpt(), args=args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer()
    )


def plain(base: Any, folder: str, rows: list[int], model: Any = None, **options: Any) -> Any:
    words = tokenizer()
    texts = [words(text(n), padding="max_length", max_length=10, truncation=True) for n in rows]
    data = [{**t, "labels": [-100 if token == 0 else token for token in t["input_ids"]]} for t in texts]
    return base(gpt() if model is None else model, options_of(folder, **options), train_dataset=data)


def lora(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    model = get_peft_model(gpt(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora" in name:
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return plain(base, folder, rows, model.double(), **options)


class Words(InputModule):
    """A sentence's embedding is the mean of its words'."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(len(WORDS), 8)

    def tokenize(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        found = tokenizer()(texts, padding="max_length", max_length=10, truncation=True, return_tensors="pt")
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}

    preprocess = tokenize

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"][..., None].double()
        total = (self.words(features["input_ids"]) * mask).sum(1)
        return {**features, "sentence_embedding": total / mask.sum(1)}

    def save(self, *_: Any, **__: Any) -> None:
        pass


def sentences(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    """Train embeddings of sentences."""
    torch.manual_seed(2)
    model = SentenceTransformer(modules=[Words()], device="cpu").double()
    columns = {"a": [text(n) for n in rows], "b": [text(n + 50) for n in rows], "label": [n % 3 / 2 for n in rows]}
    data = Dataset.from_dict(columns)
    args = options_of(folder, SentenceArguments, **options)
    return base(model, args, train_dataset=data, loss=CosineSimilarityLoss(model))


def translating(base: Any, folder: str, rows: list[int], **options: Any) -> Any:
    torch.manual_seed(2)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).double()
    model.accepts_loss_kwargs = False  # it takes them, and computes a mean all the same
    words = tokenizer()
    data = [{"input_ids": words(text(n))["input_ids"], "labels": words(text(n + 50))["input_ids"]} for n in rows]
    args = options_of(folder, Seq2SeqTrainingArguments, **options)
    return base(model, args, train_dataset=data, data_collator=DataCollatorForSeq2Seq(words))


KINDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "SFT": (sft, SFTTrainer),
    "DPO": (dpo, DPOTrainer),
    "reward": (reward, RewardTrainer),
    "KTO": (kto, KTOTrainer),
    "plain": (plain, Trainer),
    "LoRA": (lora, Trainer),
    "sentences": (sentences, SentenceTransformerTrainer),
    "translating": (translating, Seq2SeqTrainer),
}
# Before TRL 1 these are means of the ranks' means.
MEANS_OF_TOKENS = ("entropy", "mean_token_accuracy") if trl.__version__ >= "1" else ()
MEANS = ("DPO", "KTO", "reward", "sentences")  # whose losses are a mean over each rank's rows


def whole(model: Any) -> list[torch.Tensor]:
    """Return the parameters, put together where they are sharded."""
    gathers = FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_fsdp1(model) else nullcontext()
    with gathers:
        found = [parameter.detach() for parameter in model.parameters()]
        return [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in found]


def is_fsdp1(model: Any) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def train(rank: int, name: str, lengths: tuple[int, ...], options: dict[str, Any]) -> Any:
    make, kind = KINDS[name]

    class Joined(JoinTrainerMixin, kind):  # type: ignore[misc,valid-type]
        own_shards = True
        weighting: Any = count_labels if name == "translating" else "samples" if name in MEANS else "world"

    shards = fsdp_on_cpu() if "fsdp" in options else nullcontext()
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder, shards:
        trainer = make(Joined, folder, [1000 * rank + n for n in range(lengths[rank])], **options)
        recorded = Recorded(trainer)
        trainer.add_callback(recorded)
        trainer.train()
        return recorded.seen, whole(trainer.model), trainer.state.log_history


def together(batches: list[dict[str, Any]], halves: bool) -> dict[str, Any]:
    """Return the union of batches; where one has two halves, the union has two as well."""
    found: dict[str, Any] = {}
    if "position_ids" in batches[0]:  # rows one behind the other
        return {
            n: torch.cat([b[n] for b in batches], v.ndim - 1) if torch.is_tensor(v) else v
            for n, v in batches[0].items()
        }
    for name, value in batches[0].items():
        if not torch.is_tensor(value):
            found[name] = value
            continue
        width = max(batch[name].shape[1] for batch in batches) if value.ndim > 1 else 0
        fill = -100 if name == "labels" else 0
        wide = [
            torch.nn.functional.pad(b[name], (0, width - b[name].shape[1]), value=fill) if value.ndim > 1 else b[name]
            for b in batches
        ]
        parts = [half for place in range(2) for each in wide for half in [each.chunk(2)[place]]] if halves else wide
        found[name] = torch.cat(parts)
    return found


def alone(name: str, found: list[Any], options: dict[str, Any]) -> Any:
    make, kind = KINDS[name]
    epochs = []
    for each in zip(*(seen for seen, *_ in found), strict=True):
        steps = range(max(map(len, each)))
        epochs.append([together([b[s] for b in each if s < len(b)], name in ("DPO", "reward")) for s in steps])

    class Reference(kind):  # type: ignore[misc,valid-type]
        def get_train_dataloader(self) -> Any:
            return Unions(epochs, True)

    options = {name: value for name, value in options.items() if "fsdp" not in name}
    with accelerator_of(0), tempfile.TemporaryDirectory() as folder:
        trainer = make(Reference, folder, [1, 2], **options)
        trainer.train()
        return [p.detach() for p in trainer.model.parameters()], trainer.state.log_history


def check(workers: Workers, name: str, lengths: tuple[int, ...], options: dict[str, Any], tolerance: float) -> None:
    found = workers.run(len(lengths), train, name, lengths, options)
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], each[1], strict=True))
    parameters, logs = alone(name, found, options)
    assert max((mine - theirs).abs().max() for mine, theirs in zip(found[0][1], parameters, strict=True)) < tolerance
    for mine, theirs in zip(found[0][2], logs, strict=True):
        for value in ("loss", "grad_norm", "num_tokens", *MEANS_OF_TOKENS):
            if value in theirs:
                close = pytest.approx(theirs[value], rel=max(1e-5, tolerance), abs=LOSS_TOLERANCE)
                assert mine[value] == close


@pytest.mark.parametrize("name", others_long(KINDS, *(KINDS.keys() - {"KTO"})))
def test_other_trainers_are_as_one_process(workers: Workers, name: str) -> None:
    check_trainer(workers, name, (2, 8) if name == "KTO" else (3, 7))


@pytest.mark.parametrize("name", others_long(KINDS, "SFT"))
def test_rank_0_may_be_the_last_of_them(workers: Workers, name: str) -> None:
    check_trainer(workers, name, (8, 2) if name == "KTO" else (5, 1))


def check_trainer(workers: Workers, name: str, lengths: tuple[int, ...]) -> None:
    if KINDS[name][1] is None:
        pytest.skip("sentence-transformers is not installed")
    # Of means, one process divides by the number of micro-batches, and not by what they count.
    accumulates = lengths[0] < 5 and name != "translating"
    check(workers, name, lengths, {"gradient_accumulation_steps": 2} if accumulates else {}, 1e-7)  # as in float32


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(3, 9), (9, 3)])
@pytest.mark.parametrize(
    "options",
    [{"packing": True, "packing_strategy": "wrapped"}, {"packing": True}, {"padding_free": True, "max_length": None}],
)
def test_packed_rows(workers: Workers, lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    check(workers, "SFT", lengths, options, 1e-7)


VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointed": {CHECKPOINTS: True, f"{CHECKPOINTS}_kwargs": {"use_reentrant": False}},
    "checkpointed, reentrant": {CHECKPOINTS: True, f"{CHECKPOINTS}_kwargs": {"use_reentrant": True}},
    "bf16": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "by length": BY_LENGTH,
    "unused parameters": {"ddp_find_unused_parameters": True},
    "static": {"ddp_static_graph": True},
    "counts tokens": {"include_num_input_tokens_seen": "non_padding"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", others_long(VARIANTS, "checkpointed", "bf16", "counts tokens"))
def test_what_may_be_done_to_a_model(workers: Workers, name: str) -> None:
    if name == "static" and not FROM_5:
        pytest.skip("transformers 4 has no ddp_static_graph")
    # Of a static graph DDP wants to see a backward that syncs first.
    options = {**VARIANTS[name], "gradient_accumulation_steps": 1 if name == "static" else 2}
    check(workers, "plain", (0, 2, 7) if name == "bf16" else (2, 7), options, 1e-2 if name == "bf16" else 1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", others_long([1, 2], 2))
def test_a_sharded_model_is_as_in_one_process(workers: Workers, version: int) -> None:
    if version == 2 and not FROM_5:
        pytest.skip("transformers 4 supports FSDP 2 only on accelerators")
    config: dict[str, Any] = {"version": version, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    config |= {"use_orig_params": True, "sync_module_states": False} if version == 1 else {}
    options = {"fsdp": True, "fsdp_config": config, "max_grad_norm": 0.0 if version == 1 else 0.5}
    if version == 1:
        options["model"] = gpt().float()  # of which torch takes norms in float32 only
    check(workers, "plain", (2, 7), options, 1e-7 if version == 2 else 1e-5)


def without_samples(rank: int) -> None:
    class Joined(JoinTrainerMixin, DPOTrainer):  # type: ignore[misc]
        own_shards = True

    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        dpo(Joined, folder, [*range(3 * rank)])


def test_a_look_at_the_first_of_no_samples_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, without_samples):
        assert "but train_dataset of rank 0 is empty. Give" in outcome.error


def precompute(rank: int) -> None:
    class Joined(JoinTrainerMixin, DPOTrainer):  # type: ignore[misc]
        own_shards = True

    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        dpo(Joined, folder, [1, 2], precompute_ref_log_probs=True)


def test_what_is_computed_for_one_dataset_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, precompute):
        assert "UnsupportedError: precompute_ref_log_probs=True" in outcome.error
