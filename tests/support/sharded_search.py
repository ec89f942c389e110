"""Random trainings of sharded models, and which of them torch itself, or a framework, cannot do on CPUs."""

import random
from typing import Any

import torch

from tests.support.run import OPTIMIZERS
from tests.support.sharded import EPOCHS, Recipe

KINDS = [
    *["mlp"] * 4,
    *["either", "skipping", "repeating", "unused", "checkpointed", "partly used"] * 2,
    *["frozen", "partly frozen", "tied", "checkpointed reentrant"],
]
STRAYS = ("either", "skipping", "unused")  # of which a module is not used in each step
IDIOMS = ["zero_grad to zero", "model.zero_grad", "None", "data.zero_", "zero_", "zeros"]
LOW, FULL = torch.bfloat16, torch.float32


def draw(seed: int) -> Recipe:
    """Return the training of this seed: the first one that torch can do."""
    rng = random.Random(seed)
    while impossible(recipe := _any(rng)):
        pass
    return recipe


def draw_for_lightning(seed: int) -> Recipe:
    """Return the training of this seed by Lightning's strategies."""
    rng = random.Random(f"lightning {seed}")
    while impossible(recipe := _for_lightning(rng)) or not fits_one_process(recipe):
        pass
    return recipe


def impossible(recipe: Recipe) -> str:
    """Say why torch's own FSDP cannot do this on CPUs, with as many batches on all ranks too; nothing if it can."""
    if recipe.api == "fsdp1":
        if recipe.clip and recipe.dtype == torch.float64:
            return "its clip_grad_norm_ computes in float32"
        if recipe.options.get("offload"):
            return "its result is wrong on CPUs"
        if recipe.no_sync and recipe.accumulate > 1 and recipe.model in STRAYS:
            return "it asserts where a module that has accumulated is not used in the step that syncs"
        if recipe.clears == "zeros" and recipe.no_sync and recipe.stops:
            return "what a window that was cut has accumulated is no shard, in whose place there could be another"
        if recipe.model == "checkpointed reentrant" and "forwards" in recipe.loss:
            return "its second forward through reentrant checkpoints finds the parameters freed"
        if recipe.model == "partly frozen" and not recipe.options.get("original", True):
            return "one flat parameter is trained or frozen as a whole"
    elif recipe.model in (*STRAYS, "partly used") and recipe.no_sync and "precision" in recipe.options:
        return "it looks for gradients of what has not run yet, and expects one dtype of all that it reduces"
    if recipe.no_all_reduce and recipe.model == "partly used":
        return "what replicas have not averaged yet is of other parameters in each micro-batch, and it adds it up"
    of_lightning = isinstance(recipe.framework.get("saves"), int)
    shards = recipe.framework.get("in shards")
    if of_lightning and not shards and not recipe.options.get("original", True):
        return "Lightning cannot name what is in a flat parameter in a whole checkpoint"
    if of_lightning and recipe.optimizer == "plain":
        return "Lightning cannot load a checkpoint of an optimizer without a state"
    if of_lightning and recipe.model in (*STRAYS, "partly used") and recipe.api == "fsdp2":
        return "of parameters that have not been used yet there is no state, which torch asks for"
    if of_lightning and recipe.model in STRAYS and recipe.options.get("prefetch", "") != "":
        return "what was prefetched for a module that did not run cannot be saved"
    if of_lightning and shards and recipe.api == "fsdp1" and "mesh" in recipe.options:
        return "shards of replicas that Lightning loads are others than it has saved"
    return ""


def fits_one_process(recipe: Recipe) -> bool:
    """Whether one plain process tells what is right; else FSDP itself does, on padded ranks."""
    if (
        (recipe.clears != "zero_grad" and not recipe.framework)
        or recipe.clear == "between"
        or "precision" in recipe.options
    ):
        return False  # what is cleared, and rounded, is FSDP's to say
    if recipe.no_all_reduce and recipe.model in STRAYS:
        return False  # what is not used in the step that averages keeps its replicas' own gradients
    if recipe.stops and (recipe.rest == "goes on" or recipe.stops % recipe.accumulate):
        return False  # what has not been averaged yet is not cleared by the optimizer
    return recipe.api == "fsdp2" or recipe.model != "partly used"  # a flat parameter's gradient is one


def _any(rng: random.Random) -> Recipe:
    world_size = rng.choices([2, 3, 4], [5, 4, 2])[0]
    api = rng.choice(["fsdp1", "fsdp2"])
    options = _options(rng, api, world_size)
    scaled = rng.random() < 0.1
    clip = 0.3 if rng.random() < 0.2 else 0.0
    low = scaled or "precision" in options or (clip and api == "fsdp1") or rng.random() < 0.05
    weighting = "world" if "precision" in options else rng.choice(["world", "active", "samples"])
    loop = rng.choices(["batches", "iterable", "plain"], [4, 2, 3])[0]
    accumulates = rng.random() < 0.5
    idiom = rng.random() < 0.25
    lengths = _lengths(rng, world_size)
    return Recipe(
        lengths,
        api=api,
        model=rng.choice(KINDS),
        weighting=weighting,
        optimizer="sgd" if low and "precision" not in options else rng.choice(["sgd", "adamw"]),
        scheduler="step" if rng.random() < 0.3 else None,
        clip=clip,
        accumulate=rng.randint(2, 4) if accumulates else 1,
        no_sync=accumulates and rng.random() < 0.6,
        rest="goes on" if accumulates and rng.random() < 0.3 else "steps",
        no_all_reduce=accumulates and api == "fsdp2" and "mesh" in options and rng.random() < 0.4,
        clears=rng.choice(IDIOMS) if idiom and not options.get("unused") else "zero_grad",
        clear=rng.choices(["before", "between", "after"], [6, 1, 2])[0] if not options.get("unused") else "before",
        masked=rng.randrange(world_size) if rng.random() < 0.15 else -1,
        loss=_loss(rng, 0.15),
        evaluation=""
        if rng.random() < 0.6
        else "another with"
        if loop == "plain" or rng.random() < 0.5
        else "same with",
        loop="plain" if loop == "plain" else "batches",
        iterable=loop == "iterable",
        may_break=loop != "plain" and rng.random() < 0.25,
        scaler=4096.0 if scaled else 0.0,
        stops=rng.randint(1, max(lengths)) if rng.random() < 0.1 else 0,
        dtype=FULL if low else torch.float64,
        options=options,
    )


def _in_framework(rng: random.Random) -> Recipe:
    """Return what both frameworks can do."""
    world_size = rng.choices([2, 3, 4], [5, 4, 2])[0]
    api = rng.choice(["fsdp1", "fsdp2"])
    options = {name: value for name, value in _options(rng, api, world_size).items() if name != "precision"}
    options.pop("reshard backward", None)
    if api == "fsdp1":
        options.pop("offload", None)
    window = rng.choices([1, 2, 3, 4], [4, 2, 2, 1])[0]
    lengths = _lengths(rng, world_size)
    windows = max(lengths) // window
    kind = rng.choice(KINDS)
    zeros = kind not in (*STRAYS, "partly used") and "unused" not in options and rng.random() < 0.2
    return Recipe(
        lengths,
        api=api,
        model=kind,
        clears="zero_grad to zero" if zeros else "zero_grad",
        weighting=rng.choice(["world", "active", "samples"]),
        optimizer=rng.choice([*OPTIMIZERS]),
        groups=rng.choice([1, 1, 1, 2]) if options.get("original", True) else 1,
        scheduler=rng.choices([None, "step", "epoch"], [5, 3, 2])[0],
        accumulate=window,
        masked=rng.randrange(world_size) if rng.random() < 0.1 else -1,
        loss=_loss(rng),
        evaluation="same with" if rng.random() < 0.4 else "",
        iterable=rng.choices([False, True], [2, 1])[0],
        stops=window * rng.randint(1, windows) if windows and rng.random() < 0.1 else 0,
        options=options,
    )


def _for_lightning(rng: random.Random) -> Recipe:
    recipe = _in_framework(rng)
    framework = {name: True for name in ("in shards", "callback", "logs") if rng.random() < 0.3}
    if rng.random() < 0.3:
        steps = EPOCHS * -(-(recipe.stops or max(recipe.lengths)) // recipe.accumulate)
        framework["saves"] = rng.randint(1, steps)
    if recipe.api == "fsdp1":
        recipe = recipe.but(no_sync=recipe.accumulate > 1)  # as Lightning accumulates where a model has a `no_sync`
        if not recipe.model.startswith("checkpointed") and rng.random() < 0.15:
            framework["policy"] = True
    if recipe.accumulate == 1 and rng.random() < 0.03:
        framework["manual"] = True
    elif rng.random() < 0.25:
        recipe = recipe.but(clip=0.3 if recipe.api == "fsdp2" else 0.05)
        recipe = recipe.but(clip_by="norm" if recipe.api == "fsdp2" and rng.random() < 0.8 else "value")
    if recipe.api == "fsdp2" and recipe.world_size == 2 and rng.random() < 0.25:
        options = {name: value for name, value in recipe.options.items() if name != "offload"}
        recipe = recipe.but(model="of even width", clip=0.0, options={**options, "tensor": 2})
    return recipe.but(framework=framework)


def _loss(rng: random.Random, doubled: float = 0.0) -> str:
    forwards = rng.choices(["simple", "two forwards", "three forwards"], [8, 2, 1])[0]
    return forwards + (", two backwards" if rng.random() < doubled else "")


def _lengths(rng: random.Random, world_size: int) -> tuple[int, ...]:
    lengths = [rng.randint(0, 6) for _ in range(world_size)]
    if rng.random() < 0.3:
        lengths[rng.randrange(world_size)] = 0
    if rng.random() < 0.3:
        lengths[0] = rng.randint(0, min(lengths))  # it has joined first
    if not any(lengths):
        lengths[-1] = rng.randint(1, 6)
    return tuple(lengths)


def _options(rng: random.Random, api: str, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    first = api == "fsdp1"
    if rng.random() < 0.1:
        options["precision"] = rng.choice(
            [{"param_dtype": LOW}, {"param_dtype": LOW, "reduce_dtype": FULL}, {"reduce_dtype": LOW}]
        )
    if rng.random() < 0.3:
        options["prefetch"] = rng.choice(["BACKWARD_PRE", "BACKWARD_POST", None]) if first else True
    if world_size == 4 and rng.random() < 0.5:
        options["mesh"] = (2, 2)
    if first:
        if rng.random() < 0.3:
            options["original"] = False
        if "mesh" in options:
            options["strategy"] = rng.choice(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
        elif rng.random() < 0.4:
            options["strategy"] = "SHARD_GRAD_OP"
        return options
    if rng.random() < 0.4:
        options["reshard"] = rng.choice(
            [True, False, 2] if world_size == 4 and "mesh" not in options else [True, False]
        )
    for name, value in {"reshard backward": False, "offload": True, "unused": True}.items():
        if rng.random() < 0.1:
            options[name] = value
    return options
